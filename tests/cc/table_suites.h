// All topics of the contract suite of Table.
#ifndef DYNEMB_TESTS_CC_TABLE_SUITES_H_
#define DYNEMB_TESTS_CC_TABLE_SUITES_H_

#include "tests/cc/table_suite_basic.h"
#include "tests/cc/table_suite_evict.h"
#include "tests/cc/table_suite_expiry.h"
#include "tests/cc/table_suite_gradient.h"
#include "tests/cc/table_suite_grow.h"
#include "tests/cc/table_suite_random.h"
#include "tests/cc/table_suite_scores.h"
#include "tests/cc/table_suite_select.h"
#include "tests/cc/table_suite_time.h"

// Runs every topic for every TableConfig in `types`.
#define INSTANTIATE_TABLE_SUITES(prefix, types)                 \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableBasic, types);    \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableEvict, types);    \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableExpiry, types);   \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableGradient, types); \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableGrow, types);     \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableRandom, types);   \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableScores, types);   \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableSelect, types);   \
  INSTANTIATE_TYPED_TEST_SUITE_P(prefix, TableTime, types)

#endif  // DYNEMB_TESTS_CC_TABLE_SUITES_H_
