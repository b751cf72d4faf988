// SimulatedGuard: who may access the memory of simulated devices, and when. A test can guard this
// memory, so that host code which accesses it is found.
//
// SimulatedDevice says when its work accesses device memory: the bodies of a launch, a copy, a
// fill, a sum, a sort. Each is one AccessScope. Without a guard, scopes do nothing.
#ifndef DYNEMB_TESTS_SIMULATED_GUARD_H_
#define DYNEMB_TESTS_SIMULATED_GUARD_H_

#include <cstddef>

namespace dynemb {

class SimulatedGuard {
 public:
  virtual ~SimulatedGuard() = default;

  // The calling thread, and threads that it starts, may access device memory from Begin to End.
  // Scopes of several threads overlap; those of one thread do not nest.
  virtual void Begin() = 0;
  virtual void End() = 0;

  // The workspace of sessions; aligned to 256 bytes. Null if there is no memory.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* p) = 0;

  // The guard of the process; null: none. Set before the first session begins.
  static SimulatedGuard*& Get() {
    static SimulatedGuard* guard = nullptr;
    return guard;
  }
};

class AccessScope {
 public:
  AccessScope() : guard_(SimulatedGuard::Get()) {
    if (guard_ != nullptr) guard_->Begin();
  }
  ~AccessScope() {
    if (guard_ != nullptr) guard_->End();
  }
  AccessScope(const AccessScope&) = delete;
  AccessScope& operator=(const AccessScope&) = delete;

 private:
  SimulatedGuard* const guard_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_SIMULATED_GUARD_H_
