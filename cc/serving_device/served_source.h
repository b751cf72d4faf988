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

// Allocates a range of at least these bytes. `what` completes the error.
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
  // Copies a source of `rows`. At most max_device_bytes of vectors are in the device's memory.
  // DataLoss if a file is damaged, or an index has an entry that it cannot have. Other sessions of
  // the device's own stream wait for a chunk at most.
  static Status Make(Device& device, const TableRows& rows, const RowSource& source,
                     uint64_t max_device_bytes, std::shared_ptr<const DeviceSource>* made) {
    auto copy = std::make_shared<DeviceSource>();
    DYNEMB_RETURN_IF_ERROR(copy->CopyFrom(device, rows, source, max_device_bytes));
    *made = std::move(copy);
    return Status();
  }

  // Whether this is a copy of a source that still exists.
  bool Is(const RowSource& source) const {
    return slots_ == source.slots && keys_ == source.keys && vectors_ == source.vectors;
  }
  const device::ServedSource& view() const { return view_; }
  // The bytes of slots and keys, and of vectors by their memory.
  uint64_t index_bytes() const { return index_bytes_; }
  uint64_t device_bytes() const { return view_.split * view_.row_bytes; }
  uint64_t host_bytes() const { return (view_.live - view_.split) * view_.row_bytes; }

 private:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kChunk = size_t{16} << 20;

  Status CopyFrom(Device& device, const TableRows& rows, const RowSource& source,
                  uint64_t max_device_bytes) {
    const size_t slots_bytes = sizeof(uint32_t) << source.log_slots;
    const size_t keys_bytes = source.n * rows.key_bytes();
    const size_t vectors_bytes = source.live * source.row_bytes;
    const std::string table = "table '" + rows.entry().name + "'";
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
    IndexCheck check;
    DYNEMB_RETURN_IF_ERROR(CopyArray(rows, source.slots_file, source.slots, slots_bytes,
                                     [&](size_t at, const char* from, size_t bytes) {
                                       check.Add(from, bytes, source.n);
                                       return CopyToDevice(device, index_.data() + at, from, bytes);
                                     }));
    if (!check.IsSound()) {
      return DataLoss("the index of " + table +
                      " is damaged: an entry is of no key, or no slot is empty");
    }
    DYNEMB_RETURN_IF_ERROR(CopyArray(rows, source.keys_file, source.keys, keys_bytes,
                                     [&](size_t at, const char* from, size_t bytes) {
                                       return CopyToDevice(device, index_.data() + keys_at + at,
                                                           from, bytes);
                                     }));
    DYNEMB_RETURN_IF_ERROR(CopyArray(
        rows, source.vectors_file, source.vectors, vectors_bytes,
        [&](size_t at, const char* from, size_t bytes) {
          const size_t in_device = at < split_bytes ? std::min(bytes, split_bytes - at) : 0;
          if (in_device != 0) {
            DYNEMB_RETURN_IF_ERROR(CopyToDevice(device, device_rows_.data() + at, from, in_device));
          }
          if (in_device != bytes) {
            std::memcpy(host_rows_.data() + (at + in_device - split_bytes), from + in_device,
                        bytes - in_device);
          }
          return Status();
        }));
    index_bytes_ = slots_bytes + keys_bytes;
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
    return Status();
  }

  // Calls copy(at, from, bytes) for each chunk of an array, at once after it was verified: a file
  // may be larger than the memory that keeps it.
  template <class Copy>
  static Status CopyArray(const TableRows& rows, const VerifiedFile* file, const void* array,
                          size_t bytes, const Copy& copy) {
    const auto* const from = static_cast<const char*>(array);
    for (size_t at = 0; at < bytes; at += kChunk) {
      const size_t chunk = std::min(kChunk, bytes - at);
      if (file != nullptr && !file->Ensure(from + at, chunk)) return rows.damage();
      DYNEMB_RETURN_IF_ERROR(copy(at, from + at, chunk));
    }
    return Status();
  }

  // Returns when it is done: operators do not wait for the device's own stream.
  static Status CopyToDevice(Device& device, char* to, const char* from, size_t bytes) {
    typename Device::Session session(device, {});
    session.Copy(to, from, bytes);
    return session.Synchronize();
  }

  // Whether every search in an index ends, and finds only keys that are there.
  class IndexCheck {
   public:
    void Add(const char* slots, size_t bytes, uint64_t keys) {
      const auto* const entries = reinterpret_cast<const uint32_t*>(slots);
      for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i) {
        has_wrong_ |= entries[i] > keys;
        has_empty_ |= entries[i] == 0;
      }
    }
    bool IsSound() const { return has_empty_ && !has_wrong_; }

   private:
    bool has_wrong_ = false, has_empty_ = false;
  };

  // On the host.
  const uint32_t* slots_ = nullptr;
  const char* keys_ = nullptr;
  const char* vectors_ = nullptr;
  uint64_t index_bytes_ = 0;
  typename Device::Range index_, device_rows_;
  typename Device::HostRange host_rows_;
  device::ServedSource view_;
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_SERVED_SOURCE_H_
