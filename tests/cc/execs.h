// The Execs that must all give the same bits.
#ifndef DYNEMB_TESTS_CC_EXECS_H_
#define DYNEMB_TESTS_CC_EXECS_H_

#include <gtest/gtest.h>

#include "cc/table/exec.h"

namespace dynemb {

// fn(exec): first by one thread, then by two and by four; not further once a check has failed.
template <class Fn>
void ForEachExec(const Fn& fn) {
  SerialExec serial;
  ThreadsExec two(2), four(4);
  for (Exec* exec :
       {static_cast<Exec*>(&serial), static_cast<Exec*>(&two), static_cast<Exec*>(&four)}) {
    SCOPED_TRACE(testing::Message() << exec->parallelism() << " threads");
    fn(*exec);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_EXECS_H_
