// Compares snapshots with an Export at the watermark: random walks, chains of deltas, and threads
// that overwrite everything in the meantime. A program that includes this header defines MakeTable
// and MissingTable.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_

#include "tests/cc/snapshot_suite_calls.h"
#include "tests/cc/snapshot_suite_threads.h"
#include "tests/cc/snapshot_suite_walk.h"

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_
