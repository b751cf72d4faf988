#include "cc/file/process_folder.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "cc/file/open_files.h"
#include "cc/table/process_state.h"

namespace dynemb {
namespace {

constexpr char kPrefix[] = "rows-", kSuffix[] = ".rows";
constexpr char kMarker[] = "tf_dynemb rows ";  // then 32 hexadecimal digits, and a newline
constexpr size_t kMarkerBytes = sizeof(kMarker) - 1 + 32 + 1;

struct State {
  void InChild() {}

  std::mutex mutex;
  // By process, file system and folder: several of each only in tests, and after fork.
  std::map<std::pair<std::pair<int, FileSystem*>, std::string>, std::weak_ptr<ProcessFolder>>
      folders;
};

bool IsNumber(const std::string& text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool StartsWith(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// rows-<pid>-<n>
bool IsProcessFolder(const std::string& name) {
  if (!StartsWith(name, kPrefix)) return false;
  const std::string rest = name.substr(sizeof(kPrefix) - 1);
  const size_t dash = rest.find('-');
  return dash != std::string::npos && IsNumber(rest.substr(0, dash)) &&
         IsNumber(rest.substr(dash + 1));
}

// <s>.rows
bool IsSegment(const std::string& name) {
  constexpr size_t kLength = sizeof(kSuffix) - 1;
  return name.size() > kLength && name.compare(name.size() - kLength, kLength, kSuffix) == 0 &&
         IsNumber(name.substr(0, name.size() - kLength));
}

std::string NewMarker() {
  std::random_device random;
  std::string marker = kMarker;
  for (int i = 0; i < 32; ++i) marker += "0123456789abcdef"[random() % 16];
  return marker + "\n";
}

bool HasMarker(FileSystem* files, int fd) {
  char text[kMarkerBytes + 1];
  size_t bytes = 0;
  while (bytes < sizeof(text)) {
    const int64_t got =
        files->Pread(fd, text + bytes, sizeof(text) - bytes, static_cast<int64_t>(bytes));
    if (got < 0) return false;
    if (got == 0) break;
    bytes += static_cast<size_t>(got);
  }
  return bytes == kMarkerBytes && memcmp(text, kMarker, sizeof(kMarker) - 1) == 0 &&
         text[kMarkerBytes - 1] == '\n';
}

// Whether a path leads to an open file.
bool IsAt(FileSystem* files, const std::string& path, int fd) {
  const int now = files->Open(path, O_PATH | O_NOFOLLOW, 0);
  if (now < 0) return false;
  FileId at_path, of_fd;
  const bool same =
      files->Identify(now, &at_path) == 0 && files->Identify(fd, &of_fd) == 0 && at_path == of_fd;
  (void)files->Close(now);
  return same;
}

// Removes the folder of a table, if nothing else is in it.
void RemoveTable(FileSystem* files, const std::string& folder) {
  std::vector<std::string> names;
  (void)files->List(folder, &names);
  for (const std::string& name : names) {
    if (IsSegment(name)) (void)files->Unlink(folder + "/" + name);
  }
  (void)files->RemoveDirectory(folder);
}

// Removes all of a folder whose lock this process has.
void RemoveAll(FileSystem* files, const std::string& path) {
  std::vector<std::string> names;
  (void)files->List(path, &names);
  for (const std::string& name : names) {
    if (IsNumber(name)) RemoveTable(files, path + "/" + name);
  }
  // While something is left, the marker has to stay: it says whose it is.
  names.clear();
  if (files->List(path, &names) != 0 || names != std::vector<std::string>{"LOCK"}) return;
  (void)files->Unlink(path + "/LOCK");
  (void)files->RemoveDirectory(path);
}

}  // namespace

void ProcessFolder::RemoveIfLeft(FileSystem* files, const std::string& path) {
  const std::string lock = path + "/LOCK";
  const int fd = OpenFiles::Open(*files, lock, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
  if (fd < 0) return;
  if (HasMarker(files, fd) && files->Lock(fd) == 0 && IsAt(files, lock, fd)) RemoveAll(files, path);
  (void)files->Close(fd);
}

Status ProcessFolder::Get(FileSystem* files, const std::string& shared,
                          std::shared_ptr<ProcessFolder>* folder) {
  int error = files->MakeDirectory(shared);
  if (error < 0) return FileError(shared, -error);
  // Made first, so that fork takes its mutex after the one below, as this function does.
  (void)OpenFiles::open();
  State& state = ProcessState<State>();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (auto at = state.folders.begin(); at != state.folders.end();) {
    at = at->second.expired() ? state.folders.erase(at) : std::next(at);
  }
  std::weak_ptr<ProcessFolder>& known = state.folders[{{files->ProcessId(), files}, shared}];
  *folder = known.lock();
  std::vector<std::string> names;
  error = files->List(shared, &names);
  if (error < 0) return FileError(shared, -error);
  for (const std::string& name : names) {
    const std::string path = shared + "/" + name;
    if (*folder != nullptr && path == (*folder)->path_) continue;
    if (IsProcessFolder(name)) RemoveIfLeft(files, path);
  }
  if (*folder != nullptr) return Status();
  DYNEMB_RETURN_IF_ERROR(Make(files, shared, folder));
  known = *folder;
  return Status();
}

Status ProcessFolder::Make(FileSystem* files, const std::string& shared,
                           std::shared_ptr<ProcessFolder>* folder) {
  // A process of another container may have the same number, and therefore a folder of this name.
  static uint64_t next = 0;  // guarded by the mutex of all folders
  const std::string marker = NewMarker();
  for (;;) {
    const std::string path =
        shared + "/" + kPrefix + std::to_string(files->ProcessId()) + "-" + std::to_string(next++);
    int error = files->MakeDirectory(path);
    if (error < 0) return FileError(path, -error);
    const std::string lock = path + "/LOCK";
    const int fd = OpenFiles::Open(*files, lock, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0644);
    // ENOENT: somebody has removed the empty folder in between.
    if (fd == -EEXIST || fd == -ENOENT) continue;
    if (fd < 0) return FileError(lock, -fd);
    std::vector<std::string> names;
    if (files->List(path, &names) != 0 || names != std::vector<std::string>{"LOCK"}) {
      // A folder that was there before, of somebody else.
      (void)files->Unlink(lock);
      (void)files->Close(fd);
      continue;
    }
    error = files->Lock(fd);
    Status status = error < 0 ? FileError(lock, -error)
                              : WriteAll(*files, fd, marker.data(), marker.size(), 0, lock);
    if (status.ok()) {
      folder->reset(new ProcessFolder(files, path, fd));
      return status;
    }
    (void)files->Unlink(lock);
    (void)files->RemoveDirectory(path);
    (void)files->Close(fd);
    return status;
  }
}

ProcessFolder::~ProcessFolder() {
  if (is_owner()) RemoveAll(files_, path_);
  (void)files_->Close(lock_);
}

Status ProcessFolder::MakeTableFolder(std::string* folder) {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(ProcessState<State>().mutex);
    number = tables_++;
  }
  std::string path = path_ + "/" + std::to_string(number);
  const int error = files_->MakeDirectory(path);
  if (error < 0) return FileError(path, -error);
  *folder = std::move(path);
  return Status();
}

void ProcessFolder::RemoveTableFolder(const std::string& folder) {
  if (is_owner()) RemoveTable(files_, folder);
}

}  // namespace dynemb
