// DeviceTable: room for new rows, in memory and in the index, and the bounds of their number.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_ROOM_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_ROOM_H_

#include <algorithm>

#include "cc/device/device_table.h"
#include "cc/device/device_table_batch.h"
#include "cc/device/device_table_work.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
device::Counters DeviceTable<Device>::Read(Work& work) const {
  return ToHost(work, counters(), 1)[0];
}

template <class Device>
Status DeviceTable<Device>::Refresh(Work& work) {
  const device::Counters now = Read(work);
  DYNEMB_RETURN_IF_ERROR(work.status());
  bounds_ = {now.high_water, now.size()};
  return Status();
}

template <class Device>
void DeviceTable<Device>::ReadMail() {
  const uint64_t high = device::AtomicLoad(&mailbox()->high_water);
  const uint64_t free = device::AtomicLoad(&mailbox()->free_count);
  const auto batch = static_cast<uint32_t>(high >> 32);
  // Batch numbers are modulo 2^32.
  if (static_cast<int32_t>(batch - first_mail_) < 0 || batch_ - batch >= kBatches) return;
  const uint64_t since = given_[batch_ % kBatches] - given_[batch % kBatches];
  const uint64_t then = static_cast<uint32_t>(high);
  bounds_.high_water = std::min(bounds_.high_water, then + since);
  // Rows freed since then can only lower the true count.
  const uint64_t freed = free >> 32 == batch ? static_cast<uint32_t>(free) : 0;
  bounds_.live = std::min(bounds_.live, then - freed + since);
}

template <class Device>
Status DeviceTable<Device>::CommitRows(Store* store, uint64_t rows) {
  const uint64_t in_device = std::min(rows, store->split);
  const size_t bytes = store->layout.content_bytes();
  DYNEMB_RETURN_IF_ERROR(store->heads.Commit(rows * sizeof(RowHead)));
  DYNEMB_RETURN_IF_ERROR(store->device_rows.Commit(in_device * bytes));
  return store->host_rows.Commit((rows - in_device) * bytes);
}

template <class Device>
bool DeviceTable<Device>::HasRoom(size_t n) const {
  const size_t bytes = store_.layout.content_bytes();
  const uint64_t committed = store_.device_rows.committed() / bytes;
  const uint64_t host = store_.host_rows.committed() / bytes;
  const uint64_t rows = committed < store_.split ? committed : store_.split + host;
  const uint64_t heads = store_.heads.committed() / sizeof(RowHead);
  return After(bounds_.high_water, n) <= std::min(rows, heads) &&
         After(bounds_.live, n) <= BucketLimit(store_.ring.count);
}

template <class Device>
Status DeviceTable<Device>::MakeRoom(Work& work, Batch& batch, const uint32_t* sums) {
  const size_t num_tables = batch.tables.size();
  std::vector<size_t> small;
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    const size_t n = batch.size(t);
    if (n == 0) continue;
    if (table.HasRoom(n)) {
      table.bounds_ = {table.After(table.bounds_.high_water, n),
                       table.After(table.bounds_.live, n)};
    } else {
      small.push_back(t);
    }
  }
  if (small.empty()) return work.status();
  auto* const on_device = work.template Take<device::Room>(num_tables);
  auto* const rooms = work.template Pinned<device::Room>(num_tables);
  if (on_device == nullptr) return work.status();
  work.ForEach(num_tables, device::ReadRooms{ViewsOf(work, batch), sums, on_device});
  work.Copy(rooms, on_device, num_tables * sizeof(device::Room));
  DYNEMB_RETURN_IF_ERROR(work.Synchronize());
  for (size_t t : small) {
    DeviceTable& table = *batch.tables[t];
    const Bucket* const buckets = table.store_.ring.buckets;
    DYNEMB_RETURN_IF_ERROR(table.MakeRoom(work, rooms[t], batch.size(t)));
    if (table.store_.ring.buckets != buckets) batch.viewed = false;
  }
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::MakeRoom(Work& work, const device::Room& room, size_t n) {
  bounds_ = {room.high_water, room.high_water - room.free_count};
  // Only the number of distinct new keys matters: a batch may repeat one key many times. If batches
  // are small for the table, there is room for the next batch too, even if all its keys are new.
  // Otherwise every batch would wait here while the table is almost full.
  const size_t next = n <= bounds_.live / kFewBatches ? n : 0;
  const uint64_t live = After(bounds_.live, room.keys);
  const uint64_t live_next = After(live, next);
  // Free rows are used first.
  const uint32_t fresh = room.keys - std::min(room.keys, room.free_count);
  const uint64_t rows = After(bounds_.high_water, fresh);
  Status made = CommitRows(&store_, After(rows, next));
  if (!made.ok() && next != 0) made = CommitRows(&store_, rows);
  if (made.ok() && live_next > BucketLimit(store_.ring.count)) {
    made = GrowIndex(work, live_next);
    if (!made.ok() && next != 0) {
      made = live > BucketLimit(store_.ring.count) ? GrowIndex(work, live) : work.status();
    }
  }
  if (!made.ok()) return Refuse(room.keys, bounds_.live, made.message() + kOutOfMemory);
  bounds_ = {rows, live};
  return Status();
}

template <class Device>
uint64_t DeviceTable<Device>::BucketLimit(uint64_t buckets) const {
  return static_cast<uint64_t>(static_cast<double>(buckets * kSlotsPerBucket) *
                               options_.max_load_factor);
}

template <class Device>
Status DeviceTable<Device>::GrowIndex(Work& work, uint64_t keys) {
  Phase phase("grow the index");
  const double larger = kGrowth * static_cast<double>(BucketLimit(store_.ring.count));
  const uint64_t expected =
      std::max<uint64_t>(keys, std::min<uint64_t>(static_cast<uint64_t>(larger), capacity()));
  uint64_t buckets = 0;
  Range index;
  const auto make = [&](uint64_t room, double load) {
    buckets = BucketsFor(room, load);
    if (buckets > kMostBuckets) return ResourceExhausted("the index cannot have more buckets");
    index = Range();
    DYNEMB_RETURN_IF_ERROR(index.Reserve(*device_, buckets * sizeof(Bucket)));
    return index.Commit(buckets * sizeof(Bucket));
  };
  const double load = MaxLoad(expected, capacity());
  Status made = make(expected, load);
  if (!made.ok() && (expected > keys || load < options_.max_load_factor)) {
    made = make(keys, options_.max_load_factor);
  }
  DYNEMB_RETURN_IF_ERROR(made);
  work.Changes();
  const FlatRing before = store_.ring;
  store_.ring = {reinterpret_cast<Bucket*>(index.data()), static_cast<uint32_t>(buckets),
                 before.salt};
  work.ForEach(buckets, device::ClearBuckets{store_.ring.buckets});
  work.ForKeys(before.count, device::MoveSlots{View(), before});
  std::swap(store_.index, index);
  work.Retire(std::move(index));
  work.Settled();
  return work.status();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_ROOM_H_
