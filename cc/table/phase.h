// Phase: a named part of what a batch does, for profilers.
//
//   Phase phase("sum gradients");     // until the end of the scope
//
// Phases are opened by the thread that runs the batch, one after the other or inside each other,
// never by its helpers; so their times add up to the time of the call. Nobody listens by default,
// and a phase then costs the load of a pointer; with the operators loaded, two virtual calls more.
// The operators' phases appear in TensorFlow's
// profiler (cc/tf/trace.cc); `python -m benchmarks.phases` adds them up for a training step.
#ifndef DYNEMB_TABLE_PHASE_H_
#define DYNEMB_TABLE_PHASE_H_

#include <atomic>
#include <cstdint>

namespace dynemb {

// Is told of every phase. May be called by several threads at once.
class PhaseListener {
 public:
  virtual ~PhaseListener() = default;
  // `name` is a literal. What it returns comes back with End, on the same thread. A phase that it
  // throws for is not told of.
  virtual int64_t Begin(const char* name) = 0;
  virtual void End(int64_t id) = 0;
};

class Phase {
 public:
  explicit Phase(const char* name) : listener_(Listener().load(std::memory_order_acquire)) {
    if (listener_ == nullptr) return;
    try {
      id_ = listener_->Begin(name);
    } catch (...) {  // a batch does not fail because a profiler has no memory
      listener_ = nullptr;
    }
  }
  ~Phase() {
    if (listener_ != nullptr) listener_->End(id_);
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

  // Replaces the listener of the process; null for none. It must outlive every phase that began
  // under it.
  static void Listen(PhaseListener* listener) {
    Listener().store(listener, std::memory_order_release);
  }

 private:
  static std::atomic<PhaseListener*>& Listener() {
    static std::atomic<PhaseListener*> listener{nullptr};
    return listener;
  }

  PhaseListener* listener_;
  int64_t id_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_PHASE_H_
