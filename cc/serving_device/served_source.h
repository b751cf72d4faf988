// DeviceSource: a source of rows (cc/serving/row_source.h) in the memory of a device. Immutable,
// and shared by the tables of several states.
#ifndef DYNEMB_SERVING_DEVICE_SERVED_SOURCE_H_
#define DYNEMB_SERVING_DEVICE_SERVED_SOURCE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "cc/serving/row_source.h"
#include "cc/serving/table_rows.h"
#include "cc/serving_device/served_view.h"
#include "cc/table/status.h"

namespace dynemb {

// Allocates a range of exactly these bytes. `what` completes the error.
template <class Device, class Range>
Status AllocateRange(Device& device, size_t bytes, const std::string& what, Range* range) {
  if (bytes == 0) return Status();
  DYNEMB_RETURN_IF_ERROR(range->Reserve(device, bytes));
  const Status status = range->reserved() < bytes
                            ? ResourceExhausted("there are addresses for " +
                                                std::to_string(range->reserved()) + " bytes")
                            : range->Commit(bytes);
  return status.ok() ? status
                     : Status(status.code(), what + " take " + std::to_string(bytes) +
                                                 " bytes: " + status.message());
}

template <class Device>
class DeviceSource {
 public:
  using Session = typename Device::Session;

  // Copies a source of `rows`. The vectors of at most max_device_bytes are in the device's memory.
  // DataLoss if a file is damaged, or an index has an entry that it cannot have.
  static Status Make(Device& device, Session& session, const TableRows& rows,
                     const RowSource& source, uint64_t max_device_bytes,
                     std::shared_ptr<const DeviceSource>* made) {
    auto copy = std::make_shared<DeviceSource>();
    DYNEMB_RETURN_IF_ERROR(copy->CopyFrom(device, session, rows, source, max_device_bytes));
    *made = std::move(copy);
    return Status();
  }

  // Whether this is a copy of a source that still exists.
  bool Is(const RowSource& source) const {
    return slots_ == source.slots && keys_ == source.keys && vectors_ == source.vectors;
  }
  const device::ServedSource& view() const { return view_; }
  // The bytes of slots and keys, and of vectors by their memory.
  uint64_t index_bytes() const { return index_.committed(); }
  uint64_t device_bytes() const { return view_.split * view_.row_bytes; }
  uint64_t host_bytes() const { return (view_.live - view_.split) * view_.row_bytes; }

 private:
  static constexpr size_t kAlignment = 256;

  Status CopyFrom(Device& device, Session& session, const TableRows& rows, const RowSource& source,
                  uint64_t max_device_bytes) {
    const size_t slots_bytes = sizeof(uint32_t) << source.log_slots;
    const size_t keys_bytes = source.n * rows.key_bytes();
    const size_t vectors_bytes = source.live * source.row_bytes;
    if (!Verify(source, slots_bytes, keys_bytes, vectors_bytes)) return rows.damage();
    const std::string table = "table '" + rows.entry().name + "'";
    if (!HasSoundIndex(source)) {
      return DataLoss("the index of " + table +
                      " is damaged: it has an entry without a key, or no "
                      "empty slot");
    }
    view_.split = std::min(
        source.live, source.row_bytes == 0 ? source.live : max_device_bytes / source.row_bytes);
    const size_t split_bytes = view_.split * source.row_bytes;
    const size_t keys_at = (slots_bytes + kAlignment - 1) / kAlignment * kAlignment;
    DYNEMB_RETURN_IF_ERROR(
        AllocateRange(device, keys_at + keys_bytes, "the keys of " + table, &index_));
    DYNEMB_RETURN_IF_ERROR(
        AllocateRange(device, split_bytes, "the vectors of " + table, &device_rows_));
    DYNEMB_RETURN_IF_ERROR(AllocateRange(device, vectors_bytes - split_bytes,
                                         "the vectors of " + table + " in host memory",
                                         &host_rows_));
    session.Copy(index_.data(), source.slots, slots_bytes);
    if (keys_bytes != 0) session.Copy(index_.data() + keys_at, source.keys, keys_bytes);
    if (split_bytes != 0) session.Copy(device_rows_.data(), source.vectors, split_bytes);
    if (vectors_bytes != split_bytes) {
      std::memcpy(host_rows_.data(), source.vectors + split_bytes, vectors_bytes - split_bytes);
    }
    view_.slots = reinterpret_cast<const uint32_t*>(index_.data());
    view_.keys = {index_.data() + keys_at, rows.key_bytes()};
    view_.device_rows = split_bytes != 0 ? device_rows_.data() : nullptr;
    view_.host_rows = vectors_bytes != split_bytes ? host_rows_.data() : nullptr;
    view_.live = source.live;
    view_.salt = source.salt;
    view_.log_slots = source.log_slots;
    view_.row_bytes = static_cast<uint32_t>(source.row_bytes);
    view_.format = source.format;
    slots_ = source.slots;
    keys_ = source.keys;
    vectors_ = source.vectors;
    return session.status();
  }

  static bool Verify(const RowSource& source, size_t slots, size_t keys, size_t vectors) {
    const auto is_sound = [](const VerifiedFile* file, const void* data, size_t bytes) {
      return file == nullptr || bytes == 0 || file->Ensure(static_cast<const char*>(data), bytes);
    };
    return is_sound(source.slots_file, source.slots, slots) &&
           is_sound(source.keys_file, source.keys, keys) &&
           is_sound(source.vectors_file, source.vectors, vectors);
  }

  // Whether a search ends, and finds only keys that are there.
  static bool HasSoundIndex(const RowSource& source) {
    bool sound = true;
    uint64_t empty = 0;
    for (uint64_t at = 0; at < uint64_t{1} << source.log_slots; ++at) {
      sound &= source.slots[at] <= source.n;
      empty += source.slots[at] == 0;
    }
    return sound && empty != 0;
  }

  // On the host.
  const uint32_t* slots_ = nullptr;
  const char* keys_ = nullptr;
  const char* vectors_ = nullptr;
  typename Device::Range index_, device_rows_;
  typename Device::HostRange host_rows_;
  device::ServedSource view_;
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_SERVED_SOURCE_H_
