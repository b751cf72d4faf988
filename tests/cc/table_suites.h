// The topics of the contract suite of Table. table_suite_<topic>.cc have the tests. A test program
// links them (BUILD) and instantiates them for its kinds of table.
#ifndef DYNEMB_TESTS_CC_TABLE_SUITES_H_
#define DYNEMB_TESTS_CC_TABLE_SUITES_H_

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

class TableAdmission : public TableFixture {};
class TableBasic : public TableFixture {};
class TableEvict : public TableFixture {};
class TableExpiry : public TableFixture {};
class TableGradient : public TableFixture {};
class TableGrow : public TableFixture {};
class TableRandom : public TableFixture {};
class TableScores : public TableFixture {};
class TableSelect : public TableFixture {};
class TableTime : public TableFixture {};

// These two are a separate library, for separate programs.
class TableCatchUp : public TableFixture {};
class TableCatchUpSaved : public TableFixture {};

}  // namespace testing_table
}  // namespace dynemb

// Runs every test of a topic for every kind in `kinds`, an array or a vector.
#define INSTANTIATE_TABLE_SUITE(prefix, topic, kinds) \
  INSTANTIATE_TEST_SUITE_P(prefix, topic, ::testing::ValuesIn(kinds))

#define INSTANTIATE_TABLE_SUITES(prefix, kinds)           \
  INSTANTIATE_TABLE_SUITE(prefix, TableAdmission, kinds); \
  INSTANTIATE_TABLE_SUITE(prefix, TableBasic, kinds);     \
  INSTANTIATE_TABLE_SUITE(prefix, TableEvict, kinds);     \
  INSTANTIATE_TABLE_SUITE(prefix, TableExpiry, kinds);    \
  INSTANTIATE_TABLE_SUITE(prefix, TableGradient, kinds);  \
  INSTANTIATE_TABLE_SUITE(prefix, TableGrow, kinds);      \
  INSTANTIATE_TABLE_SUITE(prefix, TableRandom, kinds);    \
  INSTANTIATE_TABLE_SUITE(prefix, TableScores, kinds);    \
  INSTANTIATE_TABLE_SUITE(prefix, TableSelect, kinds);    \
  INSTANTIATE_TABLE_SUITE(prefix, TableTime, kinds)

#define INSTANTIATE_CATCH_UP_SUITES(prefix, kinds)      \
  INSTANTIATE_TABLE_SUITE(prefix, TableCatchUp, kinds); \
  INSTANTIATE_TABLE_SUITE(prefix, TableCatchUpSaved, kinds)

#endif  // DYNEMB_TESTS_CC_TABLE_SUITES_H_
