// Phase: a named part of a call's work, for profilers.
//
//   Phase phase("sum gradients");     // until the end of the scope
//
// Only the thread that runs the call opens phases, one after another or nested; its helpers do not.
// Two phases of a call therefore overlap in time only if one is inside the other. By default there
// is no listener, and a phase costs the load of a pointer. When the operators are loaded, it also
// costs two virtual calls. The operators' phases appear in TensorFlow's profiler (cc/tf/trace.cc);
// `python -m benchmarks.phases` adds them up for a training step.
#ifndef DYNEMB_TABLE_PHASE_H_
#define DYNEMB_TABLE_PHASE_H_

#include <atomic>
#include <cstdint>

namespace dynemb {

// Is notified of every phase. Several threads may call it concurrently.
class PhaseListener {
 public:
  virtual ~PhaseListener() = default;
  // `name` is a literal. The result is passed to End, on the same thread. If Begin throws, End is
  // not called for the phase.
  virtual int64_t Begin(const char* name) = 0;
  virtual void End(int64_t id) = 0;
};

class Phase {
 public:
  explicit Phase(const char* name) : listener_(Listener().load(std::memory_order_acquire)) {
    if (listener_ == nullptr) return;
    try {
      id_ = listener_->Begin(name);
    } catch (...) {  // a batch must not fail because a profiler runs out of memory
      listener_ = nullptr;
    }
  }
  ~Phase() {
    if (listener_ != nullptr) listener_->End(id_);
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

  // Replaces the listener of the process; null: none. A listener must outlive every phase that
  // began while it was set.
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
