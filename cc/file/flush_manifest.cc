#include "cc/file/flush_manifest.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cc/file/open_files.h"
#include "cc/io/crc32c.h"
#include "cc/table/bytes.h"

namespace dynemb {
namespace {

// The last character is the version.
constexpr char kMagic[] = "tf_dynemb flush 3";
constexpr char kForgottenMagic[] = "tf_dynemb forgotten keys 1";
constexpr size_t kPieceBytes = kIndexRecordBytes << 16;

Status Damaged(const std::string& path, const std::string& why) {
  return DataLoss(path + " is not a file of a flush: " + why);
}

// Closes a descriptor at the end of a scope.
struct Closer {
  FileSystem& files;
  int fd;
  ~Closer() { files.Close(fd); }
};

// Adds a checksum, writes a file under another name, and renames it. Durable when it succeeds.
Status Publish(FileSystem& files, const std::string& folder, const std::string& name,
               ByteWriter* content) {
  content->Put(Crc32c(0, content->bytes().data(), content->bytes().size()));
  const std::string& bytes = content->bytes();
  const std::string path = folder + "/" + name, made = path + ".new";
  const int fd = OpenFiles::Open(files, made, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0644);
  if (fd < 0) return FileError(made, -fd);
  {
    const Closer closer{files, fd};
    DYNEMB_RETURN_IF_ERROR(WriteAll(files, fd, bytes.data(), bytes.size(), 0, made));
    const int error = files.Fsync(fd);
    if (error < 0) {
      // Written again into this file, the next fsync would succeed whether it is written or not.
      (void)files.Unlink(made);
      return FileError(made, -error);
    }
  }
  int error = files.Rename(made, path);
  if (error == 0) error = files.SyncDirectory(folder);
  return error < 0 ? FileError(path, -error) : Status();
}

// Reads a file, and takes its checksum off. *found: false if there is none, or no folder.
Status ReadPublished(FileSystem& files, const std::string& path, const char* magic, bool* found,
                     std::string* bytes) {
  const int fd = OpenFiles::Open(files, path, O_RDONLY, 0);
  *found = fd != -ENOENT;
  if (!*found) return Status();
  if (fd < 0) return FileError(path, -fd);
  const Closer closer{files, fd};
  const int64_t size = files.Size(fd);
  if (size < 0) return FileError(path, static_cast<int>(-size));
  uint32_t crc;
  if (size < static_cast<int64_t>(sizeof(crc))) return Damaged(path, "it is too short");
  bytes->resize(static_cast<size_t>(size));
  DYNEMB_RETURN_IF_ERROR(ReadAll(files, fd, bytes->data(), bytes->size(), 0, path));
  memcpy(&crc, bytes->data() + bytes->size() - sizeof(crc), sizeof(crc));
  bytes->resize(bytes->size() - sizeof(crc));
  if (ByteReader(*bytes).GetText() != magic) {
    return Damaged(path, "it has another format, or is damaged");
  }
  if (Crc32c(0, bytes->data(), bytes->size()) != crc) {
    return Damaged(path, "its checksum is wrong");
  }
  return Status();
}

}  // namespace

Status FlushManifest::Write(FileSystem& files, const std::string& folder) const {
  ByteWriter out;
  out.PutText(kMagic);
  out.Put(salt);
  out.Put(place_shift);
  out.Put(epoch);
  out.Put(content_bytes);
  out.PutArray(segments);
  out.Put(rows);
  out.Put(index_crc);
  out.PutText(table);
  // The names of the other files first.
  const int error = files.SyncDirectory(folder);
  if (error < 0) return FileError(folder, -error);
  return Publish(files, folder, "manifest", &out);
}

Status FlushManifest::Read(FileSystem& files, const std::string& folder, FlushManifest* manifest) {
  const std::string path = folder + "/manifest";
  std::string bytes;
  bool found = false;
  DYNEMB_RETURN_IF_ERROR(ReadPublished(files, path, kMagic, &found, &bytes));
  if (!found) return FileError(path, ENOENT);
  ByteReader in(bytes);
  (void)in.GetText();
  FlushManifest read;
  read.salt = in.Get<uint64_t>();
  read.place_shift = in.Get<uint32_t>();
  read.epoch = in.Get<uint32_t>();
  read.content_bytes = in.Get<uint64_t>();
  read.segments = in.GetArray<SegmentRecord>();
  read.rows = in.Get<uint64_t>();
  read.index_crc = in.Get<uint32_t>();
  read.table = in.GetText();
  if (!in.ok() || !in.at_end()) return Damaged(path, "it has another length");
  const std::string index = folder + "/index";
  const int fd = OpenFiles::Open(files, index, O_RDONLY, 0);
  if (fd < 0) return FileError(index, -fd);
  const Closer closer{files, fd};
  const int64_t size = files.Size(fd);
  if (size < 0) return FileError(index, static_cast<int>(-size));
  if (static_cast<uint64_t>(size) % kIndexRecordBytes != 0 ||
      static_cast<uint64_t>(size) / kIndexRecordBytes != read.rows) {
    return DataLoss(index + " has " + std::to_string(size) + " bytes, which is not the size of " +
                    std::to_string(read.rows) + " rows");
  }
  *manifest = std::move(read);
  return Status();
}

FlushIndexWriter::~FlushIndexWriter() {
  if (fd_ >= 0) files_->Close(fd_);
}

Status FlushIndexWriter::Open() {
  buffer_.reserve(kPieceBytes);
  fd_ = OpenFiles::Open(*files_, path_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0644);
  return fd_ < 0 ? FileError(path_, -fd_) : Status();
}

Status FlushIndexWriter::Add(const IndexRecord& record) {
  char bytes[kIndexRecordBytes];
  memcpy(bytes, &record.hash, 8);
  memcpy(bytes + 8, &record.place, 4);
  memcpy(bytes + 12, &record.updated, 4);
  memcpy(bytes + 16, &record.score, 4);
  buffer_.insert(buffer_.end(), bytes, bytes + sizeof(bytes));
  ++records_;
  return buffer_.size() < kPieceBytes ? Status() : WriteOut();
}

Status FlushIndexWriter::WriteOut() {
  DYNEMB_RETURN_IF_ERROR(WriteAll(*files_, fd_, buffer_.data(), buffer_.size(), offset_, path_));
  crc_ = Crc32c(crc_, buffer_.data(), buffer_.size());
  offset_ += static_cast<int64_t>(buffer_.size());
  buffer_.clear();
  return Status();
}

Status FlushIndexWriter::Finish() {
  DYNEMB_RETURN_IF_ERROR(WriteOut());
  const int error = files_->Fsync(fd_);
  return error < 0 ? FileError(path_, -error) : Status();
}

Status ReadFlushIndex(FileSystem& files, const std::string& path, uint64_t records, uint32_t crc,
                      FunctionRef<Status(const IndexRecord& record)> fn) {
  const int fd = OpenFiles::Open(files, path, O_RDONLY, 0);
  if (fd < 0) return FileError(path, -fd);
  const Closer closer{files, fd};
  std::vector<char> buffer;
  uint32_t have = 0;
  int64_t offset = 0;
  for (uint64_t left = records * kIndexRecordBytes; left != 0;) {
    buffer.resize(static_cast<size_t>(std::min<uint64_t>(left, kPieceBytes)));
    DYNEMB_RETURN_IF_ERROR(ReadAll(files, fd, buffer.data(), buffer.size(), offset, path));
    have = Crc32c(have, buffer.data(), buffer.size());
    for (size_t at = 0; at < buffer.size(); at += kIndexRecordBytes) {
      IndexRecord record;
      memcpy(&record.hash, buffer.data() + at, 8);
      memcpy(&record.place, buffer.data() + at + 8, 4);
      memcpy(&record.updated, buffer.data() + at + 12, 4);
      memcpy(&record.score, buffer.data() + at + 16, 4);
      DYNEMB_RETURN_IF_ERROR(fn(record));
    }
    offset += static_cast<int64_t>(buffer.size());
    left -= buffer.size();
  }
  return have == crc ? Status() : DataLoss(path + " is damaged: its checksum is wrong");
}

Status WriteForgotten(FileSystem& files, const std::string& folder,
                      const std::vector<uint64_t>& keys) {
  const int found = OpenFiles::Open(files, folder, O_PATH | O_DIRECTORY, 0);
  if (found == -ENOENT) return Status();
  if (found < 0) return FileError(folder, -found);
  (void)files.Close(found);
  ByteWriter out;
  out.PutText(kForgottenMagic);
  out.PutArray(keys);
  return Publish(files, folder, "forgotten", &out);
}

Status ReadForgotten(FileSystem& files, const std::string& folder, std::vector<uint64_t>* keys) {
  const std::string path = folder + "/forgotten";
  std::string bytes;
  bool found = false;
  keys->clear();
  DYNEMB_RETURN_IF_ERROR(ReadPublished(files, path, kForgottenMagic, &found, &bytes));
  if (!found) return Status();
  ByteReader in(bytes);
  (void)in.GetText();
  *keys = in.GetArray<uint64_t>();
  if (!in.ok() || !in.at_end()) return Damaged(path, "it has another length");
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
  return Status();
}

}  // namespace dynemb
