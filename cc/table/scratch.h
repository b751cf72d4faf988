// Working memory that is kept between calls. Otherwise the system would take it back at the end of
// each call, and return it page by page.
//
// - Buffer is an array that grows as needed.
// - ScratchPool keeps objects that consist of such arrays. Calls that overlap get separate objects.
// - SharedScratch is an object from a pool that the whole process shares.
#ifndef DYNEMB_TABLE_SCRATCH_H_
#define DYNEMB_TABLE_SCRATCH_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace dynemb {

// Larger arrays are freed after the call: only huge batches need them.
constexpr size_t kKeptBytes = size_t{16} << 20;

// Resets the `objects` that have an array of more than kKeptBytes. bytes_of(object) is the size of
// its largest array.
template <class Objects, class BytesOf>
void RenewLarge(Objects* objects, const BytesOf& bytes_of) {
  for (auto& object : *objects) {
    if (bytes_of(object) > kKeptBytes) object = {};
  }
}

template <class T>
class Buffer {
  static_assert(std::is_trivial<T>::value, "elements are not initialised");

 public:
  // Makes room for n elements, whose values are undefined. If the array has to grow, its contents
  // are lost.
  T* Resize(size_t n) {
    if (n > capacity_) {
      Free();  // first, so that both arrays are never held at once
      data_.reset(new T[n]);
      capacity_ = n;
    }
    return data_.get();
  }
  size_t bytes() const { return capacity_ * sizeof(T); }
  void Shrink() {
    if (bytes() > kKeptBytes) Free();
  }
  T* get() const { return data_.get(); }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  void Free() {
    data_.reset();
    capacity_ = 0;
  }

  std::unique_ptr<T[]> data_;
  size_t capacity_ = 0;
};

template <class T>
class ScratchPool {
 public:
  // Returns its object to the pool when it is destroyed.
  class Lease {
   public:
    Lease(ScratchPool* pool, std::unique_ptr<T> object) : pool_(pool), object_(std::move(object)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      std::lock_guard<std::mutex> lock(pool_->mutex_);
      try {
        pool_->idle_.push_back(std::move(object_));
      } catch (const std::bad_alloc&) {
        // The object is freed; the next call creates another.
      }
    }
    T* operator->() const { return object_.get(); }
    T* get() const { return object_.get(); }
    T& operator*() const { return *object_; }

   private:
    ScratchPool* pool_;
    std::unique_ptr<T> object_;
  };

  Lease Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return Lease(this, std::make_unique<T>());
    std::unique_ptr<T> object = std::move(idle_.back());
    idle_.pop_back();
    return Lease(this, std::move(object));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_;
};

// A T from the pool that the whole process shares. T::Shrink frees the arrays that only a huge
// batch needs.
template <class T>
class SharedScratch {
 public:
  SharedScratch() : lease_(Pool().Take()) {}
  ~SharedScratch() { lease_->Shrink(); }
  T* operator->() const { return lease_.operator->(); }
  T* get() const { return lease_.get(); }

 private:
  static ScratchPool<T>& Pool() {
    static auto* const pool = new ScratchPool<T>;  // never destroyed: tables may live until exit
    return *pool;
  }
  typename ScratchPool<T>::Lease lease_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SCRATCH_H_
