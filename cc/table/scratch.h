// Working memory that is kept between calls, as the system would take it back at the end of each
// and hand it out again page by page: Buffer, an array that only grows; ScratchPool, which keeps
// objects made of such arrays, also when calls overlap; and SharedScratch, one of the process's.
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

// More than batches of millions of keys need is given back after the call.
constexpr size_t kKeptBytes = size_t{16} << 20;

// Makes anew those of `objects` that have arrays of more: bytes_of(object) is the largest's size.
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
  // Room for n elements of any value. What was there is gone if it has to grow.
  T* Resize(size_t n) {
    if (n > capacity_) {
      Free();  // first, so that both are never held
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
  // Gives its object back to the pool at the end of its life.
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
        // The object goes; the next call makes another.
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

// A T of the process's pool of them. T::Shrink gives back what only a huge batch needs.
template <class T>
class SharedScratch {
 public:
  SharedScratch() : lease_(Pool().Take()) {}
  ~SharedScratch() { lease_->Shrink(); }
  T* operator->() const { return lease_.operator->(); }
  T* get() const { return lease_.get(); }

 private:
  static ScratchPool<T>& Pool() {
    static auto* const pool = new ScratchPool<T>;  // lives as long as any table may
    return *pool;
  }
  typename ScratchPool<T>::Lease lease_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SCRATCH_H_
