#include "cc/file/segment.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
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
  constexpr size_t kMostBlocks = 8;
  row_bytes = Aligned(sizeof(StoredRow) + content, sizeof(uint64_t));
  const size_t least = Aligned(sizeof(UnitHeader) + row_bytes, kBlockBytes) / kBlockBytes;
  double best = 0;
  for (size_t blocks = least; blocks <= std::max(least, kMostBlocks); ++blocks) {
    const size_t bytes = blocks * kBlockBytes;
    const size_t rows = (bytes - sizeof(UnitHeader)) / row_bytes;
    const double used = static_cast<double>(rows * row_bytes) / static_cast<double>(bytes);
    if (used <= best) continue;
    best = used;
    unit_bytes = bytes;
    rows_per_unit = static_cast<uint32_t>(rows);
    if (used >= 5.0 / 6) return;
  }
}

Status Segment::Create(const Context& context, const std::string& path, uint32_t sequence,
                       const RowFormat& format, uint32_t epoch, uint32_t max_rows,
                       std::shared_ptr<Segment>* segment) {
  std::shared_ptr<Segment> made(new Segment(context, path, sequence, format, epoch, max_rows));
  made->removes_ = false;  // what is there is not its own
  const int fd =
      OpenFiles::Open(*context.files, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644);
  if (fd < 0) return FileError(path, -fd);
  made->removes_ = true;
  (void)context.files->Close(fd);
  *segment = std::move(made);
  return Status();
}

Segment::~Segment() {
  if (!removes_ || context_.files->ProcessId() != pid_) return;
  const int error = context_.files->Unlink(path());
  if (error == 0 || error == -ENOENT) return;
  try {
    context_.errors->Add(FileError(path(), -error));
  } catch (const std::bad_alloc&) {
    context_.errors->Add(ResourceExhausted(""));
  }
}

Status Segment::Open(const Context& context, const std::string& path, uint32_t sequence,
                     const RowFormat& format, uint32_t epoch, uint32_t rows,
                     std::shared_ptr<Segment>* segment) {
  std::shared_ptr<Segment> made(new Segment(context, path, sequence, format, epoch, rows));
  const int fd = OpenFiles::Open(*context.files, path, O_RDONLY | O_NOFOLLOW, 0);
  if (fd < 0) return FileError(path, -fd);
  const int64_t size = context.files->Size(fd);
  (void)context.files->Close(fd);
  made->rows_ = rows;
  made->written_units_ = made->UnitsOf(rows);
  made->sealed_ = true;
  if (size < 0) return FileError(path, static_cast<int>(-size));
  if (static_cast<uint64_t>(size) < made->bytes_written()) {
    return DataLoss(path + " has " + std::to_string(size) + " bytes; its rows need " +
                    std::to_string(made->bytes_written()));
  }
  *segment = std::move(made);
  return Status();
}

Status Segment::Sync() {
  const uint32_t written = written_units_;
  if (synced_units_ == written) return Status();
  const int fd = OpenFiles::Open(*context_.files, path(), O_RDONLY | O_NOFOLLOW, 0);
  int error = fd;
  if (fd >= 0) {
    error = context_.files->Fsync(fd);
    (void)context_.files->Close(fd);
    if (error >= 0) {
      synced_units_ = written;
      return Status();
    }
    condemned = true;
    file_.UsePageCache();
  }
  return FileError(path(), -error);
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
  const int fd = OpenFiles::Open(*context_.files, path(), O_WRONLY | O_NOFOLLOW, 0);
  if (fd < 0) return FileError(path(), -fd);
  const Status status = WriteAll(*context_.files, fd, buffer_.data(), pending,
                                 static_cast<int64_t>(bytes_written()), path());
  // Some file systems write only now, and say here that they cannot.
  const int closed = context_.files->Close(fd);
  DYNEMB_RETURN_IF_ERROR(status);
  if (closed < 0) return FileError(path(), -closed);
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
}

Status Segment::ReadUnits(uint32_t first, uint32_t n, char* to) const {
  const auto offset = static_cast<int64_t>(uint64_t{first} * format_.unit_bytes);
  ReadFile::Use use;
  DYNEMB_RETURN_IF_ERROR(file_.Open(ReadFile::Wait::kYes, &use));
  DYNEMB_RETURN_IF_ERROR(
      ReadAll(*context_.files, use.fd(), to, n * format_.unit_bytes, offset, path()));
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
  return DataLoss(At(path(), uint64_t{unit} * format_.unit_bytes) +
                  " is damaged: its checksum is wrong, or it is not the block that was written");
}

Status Segment::ReadError(const BlockRead& read) const {
  if (read.error == BlockRead::kShort) {
    return DataLoss(path() + " ends before offset " + std::to_string(read.offset + read.bytes));
  }
  return FileError(At(path(), read.offset), read.error);
}

}  // namespace dynemb
