// ScratchPool: keeps the working memory of a kernel between calls, also when calls overlap.
#ifndef DYNEMB_TF_SCRATCH_H_
#define DYNEMB_TF_SCRATCH_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace dynemb {

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
      pool_->idle_.push_back(std::move(object_));
    }
    T* operator->() const { return object_.get(); }
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

}  // namespace dynemb

#endif  // DYNEMB_TF_SCRATCH_H_
