// A kind of table for the contract suites whose memory has room for a few rows only; the others are
// in files.
#ifndef DYNEMB_TESTS_CC_FILE_TABLE_KIND_H_
#define DYNEMB_TESTS_CC_FILE_TABLE_KIND_H_

#include <memory>
#include <string>
#include <utility>

#include "cc/file/file_rows.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

inline FileOptions TestFiles() {
  FileOptions files;
  files.folder = ::testing::TempDir() + "file_tables";
  files.segment_bytes = 4 * kBlockBytes;
  files.compact_in_background = false;  // tests do not lock their tables
  return files;
}

// A table whose memory holds `hot_rows` rows without state.
inline Status MakeFileTable(const TableOptions& options, const FileOptions& files,
                            uint64_t hot_rows, std::unique_ptr<Table>* table) {
  const RowLayout row(SizeOf(options.key_type), options.dtype, options.dim, 0);
  return CreateFileTable(options, files, hot_rows * row.stride, table);
}

inline TableKind FileTable(KeyType key_type, DType dtype, uint64_t hot_rows) {
  TableKind kind = HostTable(key_type, dtype);
  kind.slowness = 16;
  kind.rows_move = true;
  kind.cold = true;
  kind.make = [hot_rows](const TableOptions& options, std::unique_ptr<Table>* table) {
    return MakeFileTable(options, TestFiles(), hot_rows, table);
  };
  return kind;
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FILE_TABLE_KIND_H_
