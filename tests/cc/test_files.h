// A folder for the files of one test, and the reading and writing of whole files.
#ifndef DYNEMB_TESTS_CC_TEST_FILES_H_
#define DYNEMB_TESTS_CC_TEST_FILES_H_

#include <dirent.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace dynemb {
namespace testing_files {

inline void RemoveAll(const std::string& path) {
  if (DIR* const opened = opendir(path.c_str())) {
    while (const dirent* entry = readdir(opened)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") RemoveAll(path + "/" + name);
    }
    closedir(opened);
  }
  std::remove(path.c_str());
}

// A new folder, which is removed with this object.
class Folder {
 public:
  Folder() : path_(::testing::TempDir() + "/dynemb_XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
    char* const resolved = realpath(path_.c_str(), nullptr);
    path_ = resolved;
    free(resolved);
  }
  ~Folder() { RemoveAll(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void Write(const std::string& path, const std::string& bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr) << path;
  EXPECT_EQ(std::fwrite(bytes.data(), 1, bytes.size(), file), bytes.size());
  EXPECT_EQ(std::fclose(file), 0);
}

inline std::string Read(const std::string& path) {
  std::string bytes;
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return bytes;
  char buffer[4096];
  for (size_t got; (got = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) {
    bytes.append(buffer, got);
  }
  std::fclose(file);
  return bytes;
}

// Changes one bit of a file.
inline void Flip(const std::string& path, size_t byte, int bit = 0) {
  std::string bytes = Read(path);
  ASSERT_LT(byte, bytes.size());
  bytes[byte] = static_cast<char>(bytes[byte] ^ (1 << bit));
  Write(path, bytes);
}

}  // namespace testing_files
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_TEST_FILES_H_
