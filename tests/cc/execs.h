// The Execs that must all give the same bits.
#ifndef DYNEMB_TESTS_CC_EXECS_H_
#define DYNEMB_TESTS_CC_EXECS_H_

#include <gtest/gtest.h>

#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// Calls fn(exec) with one thread, then two, then four, until a check fails. Sanitizers skip two
// threads, which show nothing that four do not.
template <class Fn>
void ForEachExec(const Fn& fn) {
  SerialExec serial;
  ThreadsExec two(2), four(4);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  const std::vector<Exec*> execs = {&serial, &four};
#else
  const std::vector<Exec*> execs = {&serial, &two, &four};
#endif
  for (Exec* exec : execs) {
    SCOPED_TRACE(testing::Message() << exec->parallelism() << " threads");
    fn(*exec);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_EXECS_H_
