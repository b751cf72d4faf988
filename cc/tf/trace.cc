// The library's phases (cc/table/phase.h) as events of TensorFlow's profiler, named "dynemb: ...".
#include "absl/strings/str_cat.h"
#include "cc/table/phase.h"
#include "tsl/profiler/lib/traceme.h"

namespace dynemb {
namespace {

class ProfilerListener final : public PhaseListener {
 public:
  int64_t Begin(const char* name) override {
    return tsl::profiler::TraceMe::ActivityStart([name] { return absl::StrCat("dynemb: ", name); });
  }
  void End(int64_t id) override { tsl::profiler::TraceMe::ActivityEnd(id); }
};

const bool listening = [] {
  Phase::Listen(new ProfilerListener);  // never destroyed: operators may run at exit
  return true;
}();

}  // namespace
}  // namespace dynemb
