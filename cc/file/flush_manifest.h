// FlushManifest: the contents of a flushed file table, and its files.
//
// A flush (ColdRows::Flush) makes a folder that has everything which a table needs to continue, in
// the same process or in another one:
//
//   <sequence>.rows   segments (segment.h): hard links to the table's own, which grow and disappear
//                     independently of the link, and new ones with the rows that were in memory
//   index             an IndexRecord for each row: 20 bytes, no padding
//   manifest          this; written last, under another name, and then renamed. A folder without a
//                     manifest is not a flush.
//   forgotten         keys that the table has forgotten since; none if it is missing. It is
//   replaced
//                     by a rename. Their rows are still in the other files: these do not change, as
//                     copies of the flush may share them.
//
// The files of a flush are durable (fsync) before its manifest is.
#ifndef DYNEMB_FILE_FLUSH_MANIFEST_H_
#define DYNEMB_FILE_FLUSH_MANIFEST_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_system.h"
#include "cc/table/function_ref.h"
#include "cc/table/status.h"

namespace dynemb {

struct FlushManifest {
  struct SegmentRecord {
    uint32_t number;
    uint32_t sequence;
    uint32_t rows;  // of which all are written
    uint32_t epoch;
    uint64_t content_bytes;
  };

  uint64_t salt = 0;         // of the index's hashes
  uint32_t place_shift = 0;  // PlaceBits
  uint32_t epoch = 0;        // the layout of the table
  uint64_t content_bytes = 0;
  std::vector<SegmentRecord> segments;
  uint64_t rows = 0;       // the records of the index
  uint32_t index_crc = 0;  // CRC-32C of the index
  std::string table;       // the table's own record (ColdTable::Flush)

  // Publishes the manifest in a folder whose other files are durable.
  Status Write(FileSystem& files, const std::string& folder) const;
  // DataLoss, naming the file, if it is missing, damaged, or of another version, or if the index is
  // missing or has not the size for its rows.
  static Status Read(FileSystem& files, const std::string& folder, FlushManifest* manifest);
};

// One row of the index of a flush.
struct IndexRecord {
  uint64_t hash;  // SlotIndex::ForHashes
  uint32_t place;
  uint32_t updated;
  uint32_t score;
};
constexpr size_t kIndexRecordBytes = 20;

// Writes the index of a flush, in large pieces.
class FlushIndexWriter {
 public:
  FlushIndexWriter(FileSystem* files, std::string path) : files_(files), path_(std::move(path)) {}
  ~FlushIndexWriter();
  Status Open();
  Status Add(const IndexRecord& record);
  // Makes the file durable.
  Status Finish();
  uint64_t records() const { return records_; }
  uint32_t crc() const { return crc_; }

 private:
  Status WriteOut();

  FileSystem* const files_;
  const std::string path_;
  int fd_ = -1;
  std::vector<char> buffer_;
  uint64_t records_ = 0;
  int64_t offset_ = 0;
  uint32_t crc_ = 0;
};

// Calls fn(record) for each record of an index. DataLoss, naming the file, if it is not the one
// with this checksum; fn has then been called for some of them. An error of fn ends the call.
Status ReadFlushIndex(FileSystem& files, const std::string& path, uint64_t records, uint32_t crc,
                      FunctionRef<Status(const IndexRecord& record)> fn);

// Replaces the forgotten keys of a flush; durable when the call succeeds. OK, and nothing has
// happened, if the folder does not exist anymore.
Status WriteForgotten(FileSystem& files, const std::string& folder,
                      const std::vector<uint64_t>& keys);
// Reads them, each once. DataLoss, naming the file, if it is damaged.
Status ReadForgotten(FileSystem& files, const std::string& folder, std::vector<uint64_t>* keys);

}  // namespace dynemb

#endif  // DYNEMB_FILE_FLUSH_MANIFEST_H_
