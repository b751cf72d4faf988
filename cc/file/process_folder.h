// ProcessFolder: the folder that has the files of a process's tables, below a folder that several
// processes may share.
//
//   <shared>/rows-<pid>-<n>/LOCK            locked (FileSystem::Lock) by the process, with a marker
//                           <t>/            the t-th table of the process there
//                           <t>/<s>.rows    a segment (segment.h)
//
// The files are a cache of the process (cold_rows.h). They are removed with the last table that
// uses them; after a crash, by the first table that another process makes below the same folder.
//
// Removal. Only folders that a ProcessFolder has made, and that no process uses, are removed: a
// folder of exactly such a name, whose LOCK has the marker, could be locked, and is still the LOCK
// of that folder afterwards (somebody else may have removed it, and a third one created it again);
// and in it only files of exactly such names. A marker is written after the lock was taken, so one
// that can be read and locked is of a process that does not exist anymore.
//
// A child of fork has copies of its parent's tables, and not their files: it reads them, but
// neither writes nor removes any (is_owner).
#ifndef DYNEMB_FILE_PROCESS_FOLDER_H_
#define DYNEMB_FILE_PROCESS_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "cc/file/file_system.h"
#include "cc/table/status.h"

namespace dynemb {

class ProcessFolder {
 public:
  // The folder of this process below `shared`, which is created if it is missing. Removes the
  // folders of processes that do not exist.
  static Status Get(FileSystem* files, const std::string& shared,
                    std::shared_ptr<ProcessFolder>* folder);
  ~ProcessFolder();
  ProcessFolder(const ProcessFolder&) = delete;
  ProcessFolder& operator=(const ProcessFolder&) = delete;

  // Makes an empty folder for a table.
  Status MakeTableFolder(std::string* folder);
  // Removes one, with the segments in it.
  void RemoveTableFolder(const std::string& folder);
  // Whether this process has made the folder.
  bool is_owner() const { return files_->ProcessId() == pid_; }

 private:
  ProcessFolder(FileSystem* files, std::string path, int lock)
      : files_(files), path_(std::move(path)), pid_(files->ProcessId()), lock_(lock) {}
  // Removes the folder of a process that does not exist; leaves all others.
  static void RemoveIfLeft(FileSystem* files, const std::string& path);
  static Status Make(FileSystem* files, const std::string& shared,
                     std::shared_ptr<ProcessFolder>* folder);

  FileSystem* const files_;
  const std::string path_;
  const int pid_;
  const int lock_;
  uint64_t tables_ = 0;  // guarded by the mutex of all folders
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_PROCESS_FOLDER_H_
