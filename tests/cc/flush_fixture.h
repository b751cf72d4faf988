// FileFlushTest: flushes of FileRows, and what is restored of them.
#ifndef DYNEMB_TESTS_CC_FLUSH_FIXTURE_H_
#define DYNEMB_TESTS_CC_FLUSH_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"
#include "tests/cc/cold_world.h"
#include "tests/cc/test_files.h"

namespace dynemb {

inline void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

class FileFlushTest : public ::testing::Test {
 protected:
  static std::string NewFolder(ColdWorld* world) {
    static int number = 0;
    const std::string folder = world->folder / ("flush-" + std::to_string(number++));
    EXPECT_EQ(FileSystem::Posix().MakeDirectory(folder), 0);
    return folder;
  }

  // Flushes the rows of the world, and `hot` as rows of memory.
  static Status Flush(ColdWorld* world, const std::string& folder, const ModelRows& hot) {
    std::vector<char> bytes(world->layout.stride);
    DYNEMB_RETURN_IF_ERROR(world->Rewrite());
    return world->rows->Flush(folder, "the record", [&](const ColdRows::AddHotFn& add) -> Status {
      for (const auto& [key, row] : hot) {
        memcpy(bytes.data() + world->layout.vector_offset, row.content.data(), row.content.size());
        DYNEMB_RETURN_IF_ERROR(add(key, bytes.data(), {row.updated, row.score}, row.tick));
      }
      return Status();
    });
  }

  // Another object of the same layout, with other segments.
  static std::unique_ptr<ColdRows> Empty(ColdWorld* world) {
    std::unique_ptr<ColdRows> rows;
    FileOptions options = world->file_options;
    options.files = &FileSystem::Posix();
    options.segment_bytes *= 2;
    TableOptions table = world->options;
    table.seed = 77;
    ExpectOk(FileRows::Create(options, table, &rows));
    ExpectOk(rows->ChangeLayout(world->layout, {}));
    return rows;
  }

  // A flush restores these rows.
  static void ExpectRestores(ColdWorld* world, const std::string& folder, const ModelRows& model) {
    std::unique_ptr<ColdRows> rows = Empty(world);
    std::string record;
    ExpectOk(rows->ReadFlush(folder, &record));
    EXPECT_EQ(record, "the record");
    std::vector<uint64_t> forgotten;
    ExpectOk(rows->Restore(folder, &forgotten));
    std::swap(world->rows, rows);
    ModelRows had = model;
    std::swap(world->model, had);
    world->ExpectEqual();
    std::swap(world->model, had);
    std::swap(world->rows, rows);
  }

  static ModelRows HotRows(ColdWorld* world, size_t n) {
    ModelRows hot;
    for (size_t i = 0; i < n; ++i) hot[1000000 + i] = world->RandomRow();
    return hot;
  }
  static ModelRows Union(const ModelRows& a, const ModelRows& b) {
    ModelRows all = a;
    all.insert(b.begin(), b.end());
    return all;
  }
  // The files below a folder.
  static void ListFiles(const std::string& folder, std::vector<std::string>* files) {
    std::vector<std::string> names;
    if (FileSystem::Posix().List(folder, &names) < 0) return files->push_back(folder);
    for (const std::string& name : names) ListFiles(folder + "/" + name, files);
  }
  static std::vector<std::string> Names(const std::string& folder) {
    std::vector<std::string> names;
    FileSystem::Posix().List(folder, &names);
    return names;
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FLUSH_FIXTURE_H_
