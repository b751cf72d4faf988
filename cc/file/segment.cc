#include "cc/file/segment.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "cc/io/crc32c.h"

namespace dynemb {
namespace {

// Units are written when there are this many bytes of them: sequential writes of this size are as
// fast as larger ones.
constexpr size_t kWriteBytes = size_t{1} << 20;

size_t Aligned(size_t n, size_t to) { return (n + to - 1) / to * to; }

uint32_t ChecksumOf(const char* unit, size_t bytes) {
  return Crc32c(0, unit + sizeof(uint32_t), bytes - sizeof(uint32_t));
}

std::string At(const std::string& path, uint64_t offset) {
  return path + " at offset " + std::to_string(offset);
}

}  // namespace

RowFormat::RowFormat(size_t content) : content_bytes(content) {
  row_bytes = Aligned(sizeof(StoredRow) + content, sizeof(uint64_t));
  unit_bytes = Aligned(std::max(sizeof(UnitHeader) + row_bytes, kBlockBytes), kBlockBytes);
  rows_per_unit = unit_bytes > kBlockBytes
                      ? 1
                      : static_cast<uint32_t>((unit_bytes - sizeof(UnitHeader)) / row_bytes);
}

Status Segment::Create(FileSystem* files, const std::string& path, uint32_t sequence,
                       const RowFormat& format, uint32_t epoch, uint32_t max_rows,
                       std::shared_ptr<Segment>* segment) {
  std::shared_ptr<Segment> made(new Segment(files, path, sequence, format, epoch, max_rows));
  const int fd = files->Open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return FileError(path, -fd);
  made->fd_ = fd;
  *segment = std::move(made);
  return Status();
}

Segment::~Segment() {
  if (fd_ >= 0) files_->Close(fd_);
  if (read_fd_ >= 0) files_->Close(read_fd_);
  if (removes_) files_->Unlink(path_);
}

Status Segment::Open(FileSystem* files, const std::string& path, uint32_t sequence,
                     const RowFormat& format, uint32_t epoch, uint32_t rows,
                     std::shared_ptr<Segment>* segment) {
  std::shared_ptr<Segment> made(new Segment(files, path, sequence, format, epoch, rows));
  DYNEMB_RETURN_IF_ERROR(made->OpenToRead());
  made->rows_ = rows;
  made->written_units_ = made->UnitsOf(rows);
  made->sealed_ = true;
  const int64_t size = files->Size(made->read_fd_);
  if (size < 0) return FileError(path, static_cast<int>(-size));
  if (static_cast<uint64_t>(size) < made->bytes_written()) {
    return DataLoss(path + " has " + std::to_string(size) + " bytes; its rows need " +
                    std::to_string(made->bytes_written()));
  }
  *segment = std::move(made);
  return Status();
}

Status Segment::Sync() {
  const int error = files_->Fsync(fd_ >= 0 ? fd_ : read_fd_);
  return error < 0 ? FileError(path_, -error) : Status();
}

Status Segment::OpenToRead() {
  if (read_fd_ >= 0) return Status();
  bool direct = false;
  return OpenForReading(*files_, path_, &direct, &read_fd_);
}

void Segment::Reserve(uint32_t rows) {
  const size_t units = UnitsOf(std::min(rows, max_rows_)) - written_units_;
  if (units * format_.unit_bytes > buffer_.size()) buffer_.Resize(units * format_.unit_bytes);
}

char* Segment::Unwritten(uint32_t row) {
  const size_t unit = row / format_.rows_per_unit - written_units_;
  return const_cast<char*>(RowIn(buffer_.data() + unit * format_.unit_bytes, row));
}

void Segment::Complete(uint32_t unit, char* bytes) const {
  const uint32_t first = unit * format_.rows_per_unit;
  const uint32_t rows = std::min(format_.rows_per_unit, rows_ - first);
  const size_t used = sizeof(UnitHeader) + rows * format_.row_bytes;
  memset(bytes + used, 0, format_.unit_bytes - used);
  UnitHeader header{0, sequence_, unit, rows};
  memcpy(bytes, &header, sizeof(header));
  header.crc = ChecksumOf(bytes, format_.unit_bytes);
  memcpy(bytes, &header.crc, sizeof(header.crc));
}

Status Segment::Write(bool all, uint64_t* bytes) {
  const bool ends = all || rows_ == max_rows_;
  const uint32_t complete = ends ? UnitsOf(rows_) : rows_ / format_.rows_per_unit;
  const size_t pending = (complete - written_units_) * format_.unit_bytes;
  if (pending == 0 || (!ends && pending < kWriteBytes)) return Status();
  for (uint32_t unit = written_units_; unit < complete; ++unit) {
    Complete(unit, buffer_.data() + (unit - written_units_) * format_.unit_bytes);
  }
  DYNEMB_RETURN_IF_ERROR(WriteAll(*files_, fd_, buffer_.data(), pending,
                                  static_cast<int64_t>(bytes_written()), path_));
  DYNEMB_RETURN_IF_ERROR(OpenToRead());
  *bytes += pending;
  written_units_ = complete;
  const size_t left = buffer_.size() - pending;
  memmove(buffer_.data(), buffer_.data() + pending, left);
  buffer_.Resize(left);
  // A large batch may have needed much memory.
  if (left >= kWriteBytes || buffer_.capacity() <= 2 * kWriteBytes) return Status();
  try {
    AlignedBuffer smaller(kWriteBytes);
    memcpy(smaller.data(), buffer_.data(), left);
    smaller.Resize(left);
    buffer_ = std::move(smaller);
  } catch (const std::bad_alloc&) {
    // It stays as large as it is.
  }
  return Status();
}

void Segment::Seal() {
  sealed_ = true;
  max_rows_ = rows_;
  buffer_ = AlignedBuffer();
  files_->Close(fd_);
  fd_ = -1;
}

Status Segment::ReadUnits(uint32_t first, uint32_t n, char* to) const {
  const auto offset = static_cast<int64_t>(uint64_t{first} * format_.unit_bytes);
  DYNEMB_RETURN_IF_ERROR(ReadAll(*files_, read_fd_, to, n * format_.unit_bytes, offset, path_));
  for (uint32_t i = 0; i < n; ++i) {
    DYNEMB_RETURN_IF_ERROR(CheckUnit(first + i, to + i * format_.unit_bytes));
  }
  return Status();
}

Status Segment::CheckUnit(uint32_t unit, const char* bytes) const {
  UnitHeader header;
  memcpy(&header, bytes, sizeof(header));
  if (header.crc == ChecksumOf(bytes, format_.unit_bytes) && header.sequence == sequence_ &&
      header.unit == unit && header.rows <= format_.rows_per_unit) {
    return Status();
  }
  return DataLoss(At(path_, uint64_t{unit} * format_.unit_bytes) +
                  " is damaged: its checksum is wrong, or it is not the block that was written");
}

Status Segment::ReadError(const BlockRead& read) const {
  if (read.error == BlockRead::kShort) {
    return DataLoss(path_ + " ends before offset " + std::to_string(read.offset + read.bytes));
  }
  return FileError(At(path_, read.offset), read.error);
}

Status Segment::Wipe(uint32_t row) {
  if (!IsWritten(row)) {
    memset(Unwritten(row), 0, format_.row_bytes);
    return Status();
  }
  const uint32_t unit = row / format_.rows_per_unit;
  AlignedBuffer bytes(format_.unit_bytes);
  DYNEMB_RETURN_IF_ERROR(ReadUnits(unit, 1, bytes.data()));
  memset(const_cast<char*>(RowIn(bytes.data(), row)), 0, format_.row_bytes);
  const uint32_t crc = ChecksumOf(bytes.data(), format_.unit_bytes);
  memcpy(bytes.data(), &crc, sizeof(crc));
  int fd = fd_;
  if (fd < 0) fd = files_->Open(path_, O_RDWR, 0);
  if (fd < 0) return FileError(path_, -fd);
  const Status status = WriteAll(*files_, fd, bytes.data(), format_.unit_bytes,
                                 static_cast<int64_t>(uint64_t{unit} * format_.unit_bytes), path_);
  if (fd_ < 0) files_->Close(fd);
  return status;
}

}  // namespace dynemb
