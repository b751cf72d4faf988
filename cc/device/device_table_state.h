// DeviceTable: creating a table, and reading and writing whole tables.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_STATE_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_STATE_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cc/device/device_table.h"
#include "cc/device/device_table_work.h"
#include "cc/table/memory_limit.h"
#include "cc/table/phase.h"

namespace dynemb {

namespace device {
// The maximal number of rows that one kernel lists, and of bytes in one copy to the host. They
// bound the workspace of calls that process a whole table.
constexpr uint64_t kListMost = uint64_t{1} << 22;
constexpr size_t kCopyMost = size_t{64} << 20;
// The same through pinned memory, which the stream keeps.
constexpr size_t kCopyPinned = size_t{16} << 20;
}  // namespace device

template <class Device>
Status DeviceTable<Device>::Make(const TableOptions& options, Device* device,
                                 std::unique_ptr<Table>* table, std::unique_ptr<ColdRows> cold) {
  std::unique_ptr<DeviceTable> made(new DeviceTable(device));
  DYNEMB_RETURN_IF_ERROR(made->Init(options, std::move(cold)));
  *table = std::move(made);
  return Status();
}

// The maximal bytes of addresses that a table reserves for its host rows: more than the machine's
// memory, because page-locked rows cannot move later. Sanitizers keep shadow memory for these
// addresses, so their builds reserve less.
inline size_t HostRowAddresses() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr size_t kMost = size_t{1} << 30;
#else
  constexpr size_t kMost = size_t{1} << 40;
#endif
  return std::min(kMost, 4 * PhysicalMemory());
}

template <class Device>
RowLayout DeviceTable<Device>::LayoutOf(int64_t state_width) const {
  return RowLayout(SizeOf(options_.key_type), options_.dtype, options_.dim, state_width,
                   kRowAlignment);
}

template <class Device>
uint64_t DeviceTable<Device>::SplitOf(const RowLayout& layout) const {
  return options_.tier == Tier::kHbm ? kMostRows : options_.max_hbm_bytes / layout.stride;
}

template <class Device>
Status DeviceTable<Device>::Reserve(const RowLayout& layout, Store* store) const {
  const uint64_t most =
      options_.max_capacity != 0 ? static_cast<uint64_t>(options_.max_capacity) : kMostRows;
  const size_t bytes = layout.content_bytes();
  store->layout = layout;
  store->split = std::min(SplitOf(layout), most);
  DYNEMB_RETURN_IF_ERROR(
      store->device_rows.Reserve(*device_, std::max<size_t>(1, store->split * bytes)));
  // A device may reserve less.
  store->split = std::min<uint64_t>(store->split, store->device_rows.reserved() / bytes);
  uint64_t in_host = 0;
  if (options_.tier != Tier::kHbm) {
    DYNEMB_RETURN_IF_ERROR(HostRows(layout, store->split, &in_host));
  }
  DYNEMB_RETURN_IF_ERROR(store->host_rows.Reserve(
      *device_, std::clamp<size_t>(in_host * bytes, 1, HostRowAddresses())));
  in_host = std::min<uint64_t>(in_host, store->host_rows.reserved() / bytes);
  store->capacity = store->split + in_host;
  DYNEMB_RETURN_IF_ERROR(store->heads.Reserve(*device_, store->capacity * sizeof(RowHead)));
  store->capacity = std::min<uint64_t>(store->capacity, store->heads.reserved() / sizeof(RowHead));
  return CommitRows(store,
                    std::min(static_cast<uint64_t>(options_.init_capacity), store->capacity));
}

template <class Device>
double DeviceTable<Device>::MaxLoad(uint64_t keys, uint64_t capacity) const {
  const bool keys_leave = cold_ != nullptr || options_.evict_strategy != EvictStrategy::kNone;
  return keys_leave && keys >= capacity ? std::min(options_.max_load_factor, kFullLoad)
                                        : options_.max_load_factor;
}

template <class Device>
Status DeviceTable<Device>::MakeIndex(Work& work, Store* store) const {
  const uint64_t expected =
      std::min(static_cast<uint64_t>(options_.init_capacity), store->capacity);
  const uint64_t buckets = BucketsFor(expected, MaxLoad(expected, store->capacity));
  if (buckets > kMostBuckets) return ResourceExhausted("the index cannot have more buckets");
  DYNEMB_RETURN_IF_ERROR(store->index.Reserve(*device_, buckets * sizeof(Bucket)));
  DYNEMB_RETURN_IF_ERROR(store->index.Commit(buckets * sizeof(Bucket)));
  store->ring = {reinterpret_cast<Bucket*>(store->index.data()), static_cast<uint32_t>(buckets),
                 SaltOf(options_)};
  work.ForEach(buckets, device::ClearBuckets{store->ring.buckets});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::Init(const TableOptions& options, std::unique_ptr<ColdRows> cold) {
  DYNEMB_RETURN_IF_ERROR(CheckOptions(options));
  options_ = options;
  if (cold != nullptr && options.tier != Tier::kHybrid) {
    return InvalidArgument("table '" + options.name + "' has all rows in a device's memory");
  }
  SetContentLayout(RowLayout(SizeOf(options.key_type), options.dtype, options.dim, 0));
  if (cold != nullptr) StartCold(std::move(cold));
  scoring_ = Scoring(options.evict_strategy, static_cast<uint64_t>(options.epoch_steps));
  expiry_.Configure(options);
  DYNEMB_RETURN_IF_ERROR(
      Initializer::Create(options.initializer, options.dim, options.seed, &initializer_));
  if (options.tier == Tier::kHybrid) {
    const uint64_t eighth = SplitOf(LayoutOf(0)) / 8;
    promote_most_ = static_cast<uint32_t>(std::clamp(eighth, kPromoteLeast, kPromoteMost));
  }
  const size_t own =
      sizeof(device::Counters) + sizeof(device::TierState) + num_noted() * sizeof(uint64_t);
  DYNEMB_RETURN_IF_ERROR(own_.Reserve(*device_, own));
  DYNEMB_RETURN_IF_ERROR(own_.Commit(own));
  DYNEMB_RETURN_IF_ERROR(mail_.Reserve(*device_, sizeof(device::Mailbox)));
  DYNEMB_RETURN_IF_ERROR(mail_.Commit(sizeof(device::Mailbox)));
  *mailbox() = {};
  DYNEMB_RETURN_IF_ERROR(Reserve(LayoutOf(0), &store_));
  Work work(*this, nullptr, Work::Reports::kYes);
  work.Fill(own_.data(), 0, own);
  const std::vector<InitRun>& runs = initializer_.runs();
  DYNEMB_RETURN_IF_ERROR(runs_.Reserve(*device_, runs.size() * sizeof(InitRun)));
  DYNEMB_RETURN_IF_ERROR(runs_.Commit(runs.size() * sizeof(InitRun)));
  work.Copy(runs_.data(), runs.data(), runs.size() * sizeof(InitRun));
  DYNEMB_RETURN_IF_ERROR(MakeIndex(work, &store_));
  DYNEMB_RETURN_IF_ERROR(InitAdmission(work, options.admission));
  return work.Synchronize();
}

template <class Device>
Status DeviceTable<Device>::BringInitialState(Work& work, const std::vector<float>& state,
                                              Range* made) const {
  const size_t bytes = state.size() * sizeof(float);
  DYNEMB_RETURN_IF_ERROR(made->Reserve(*device_, std::max<size_t>(1, bytes)));
  DYNEMB_RETURN_IF_ERROR(made->Commit(bytes));
  work.Copy(made->data(), state.data(), bytes);
  return work.Synchronize();
}

template <class Device>
uint64_t DeviceTable<Device>::size() const {
  Work work(*this, nullptr);
  return Read(work).size() + num_cold();
}

template <class Device>
TableStats DeviceTable<Device>::stats() const {
  Work work(*this, nullptr);
  const device::Counters c = Read(work);
  const RowLayout& l = store_.layout;
  TableStats s;
  s.size = c.size();
  s.slots = uint64_t{store_.ring.count} * kSlotsPerBucket;
  s.index_bytes = store_.ring.count * sizeof(Bucket);
  s.row_bytes = c.high_water * l.stride;
  s.metadata_bytes = s.index_bytes + s.row_bytes -
                     c.high_water * (l.vector_bytes() + l.state_bytes()) + CounterBytes();
  s.device_rows = std::min<uint64_t>(c.high_water, store_.split);
  s.hits = c.device_hits + c.host_hits;
  s.device_hits = c.device_hits;
  s.misses = c.misses;
  s.inserts = c.inserts;
  s.evictions = c.evictions;
  s.erased = c.erased;
  s.expired = c.expired;
  s.refused = c.refused + refused_;
  s.dropped_gradients = c.dropped_gradients;
  s.nonfinite_gradients = c.nonfinite_gradients;
  s.promotions = c.promotions;
  s.unadmitted = c.unadmitted;
  AddColdStats(&s);
  return s;
}

template <class Device>
Status DeviceTable<Device>::ResetState(Exec& exec, const StateSpec& spec) {
  std::vector<float> initial;
  StateSpec copy = spec;
  DYNEMB_RETURN_IF_ERROR(InitialState(spec, &initial));
  CatchUp catch_up(spec, options_.dim);
  DYNEMB_RETURN_IF_ERROR(Error());
  DYNEMB_RETURN_IF_ERROR(BringAll(exec));
  WaitForReader();
  Work work(*this, &exec, Work::Reports::kYes);
  DYNEMB_RETURN_IF_ERROR(Refresh(work));
  SaveAll(work);
  DYNEMB_RETURN_IF_ERROR(work.status());
  Store moved;
  DYNEMB_RETURN_IF_ERROR(Reserve(LayoutOf(spec.width()), &moved));
  if (cold_ == nullptr && bounds_.high_water > moved.capacity) {
    return ResourceExhausted("no address space for " + std::to_string(bounds_.high_water) +
                             " rows of " + std::to_string(moved.layout.stride) + " bytes");
  }
  const RowLayout content(store_.layout.key_size, options_.dtype, options_.dim, spec.width());
  Range made;
  DYNEMB_RETURN_IF_ERROR(BringInitialState(work, initial, &made));
  if (cold_ == nullptr) {
    DYNEMB_RETURN_IF_ERROR(CommitRows(&moved, bounds_.high_water));
  } else {
    DYNEMB_RETURN_IF_ERROR(MoveAllOut(work));
    DYNEMB_RETURN_IF_ERROR(cold_->ChangeLayout(content, initial));
  }
  work.Changes();
  initial_state_of_ = std::move(made);
  initial_state_ = reinterpret_cast<const float*>(initial_state_of_.data());
  SetContentLayout(content);
  const DeviceView from = View();
  moved.index = std::move(store_.index);
  moved.ring = store_.ring;
  std::swap(store_, moved);
  if (cold_ == nullptr) {
    work.ForRows(bounds_.high_water, vector_quads(),
                 device::MoveRows{from, View(), initial_state_});
  } else {
    work.ForEach(1, device::ForgetFree{counters()});
    bounds_ = Bounds();
  }
  state_spec_ = std::move(copy);
  LoseSteps();
  catch_up_ = std::move(catch_up);
  return work.Synchronize();
}

template <class Device>
Status DeviceTable<Device>::Clear(Exec& exec, Tick tick) {
  DYNEMB_RETURN_IF_ERROR(Error());
  WaitForReader();
  Work work(*this, &exec, Work::Reports::kYes);
  DYNEMB_RETURN_IF_ERROR(Refresh(work));
  SaveAll(work);
  Store empty;
  DYNEMB_RETURN_IF_ERROR(Reserve(store_.layout, &empty));
  DYNEMB_RETURN_IF_ERROR(MakeIndex(work, &empty));
  ForRowsInChunks(work, [&](const RowId* rows, size_t n) {
    BeforeLoss(work, rows, nullptr, n, tick, Removal::kErase);
  });
  device::Counters c = Read(work);
  DYNEMB_RETURN_IF_ERROR(work.status());
  if (cold_ != nullptr) ClearCold(tick);
  work.Changes();
  std::swap(store_, empty);
  c.erased += c.size();
  c.high_water = c.free_count = 0;
  work.Copy(counters(), &c, sizeof(c));
  if (admission_.counts()) work.Fill(admission_counters_.data(), 0, CounterBytes());
  bounds_ = Bounds();
  return work.Synchronize();
}

template <class Device>
template <class T>
std::vector<T> DeviceTable<Device>::ToHost(Work& work, const T* array, size_t n) {
  std::vector<T> host(n);
  work.Copy(host.data(), array, n * sizeof(T));
  // After a failure, status() reports it, and the elements are zeros.
  (void)work.Synchronize();
  return host;
}

template <class Device>
std::vector<RowId> DeviceTable<Device>::ListRows(Work& work, uint64_t begin, uint64_t end,
                                                 const RowPredicate& where, uint64_t most,
                                                 uint64_t* next) const {
  std::vector<RowId> rows;
  for (*next = begin; *next < end && rows.size() < most;) {
    const uint64_t from = *next;
    const uint64_t want = most - rows.size();
    uint64_t n = std::min(
        {end - from, device::kListMost, std::max<uint64_t>(2 * std::min(want, end), 65536)});
    typename Device::Session::Scratch scratch(work);
    const float* vectors = nullptr;
    if (where.has_norms && catch_up_.active()) vectors = CopyBrought(work, from, &n);
    uint32_t* sums = work.template Take<uint32_t>(n + 1);
    RowId* found = work.template Take<RowId>(n);
    if (sums == nullptr || found == nullptr) return rows;
    work.ForKeys(n + 1, device::FlagSelected{View(), options_.key_type, stamps_,
                                             stamps_.After(where.updated_after), where,
                                             scoring_.by_time(), vectors, from, n, sums});
    work.ExclusiveSum(sums, n + 1);
    const auto limit = static_cast<uint32_t>(std::min(want, n));
    work.ForEach(n, device::Compact{sums, static_cast<uint32_t>(from), limit, found});
    const uint32_t count = std::min(ToHost(work, sums + n, 1)[0], limit);
    const std::vector<RowId> chunk = ToHost(work, found, count);
    rows.insert(rows.end(), chunk.begin(), chunk.end());
    *next = rows.size() == most ? rows.back() + uint64_t{1} : from + n;
  }
  return rows;
}

template <class Device>
template <class Fn>
void DeviceTable<Device>::ForRowsInChunks(Work& work, const Fn& fn) const {
  const uint64_t end = Read(work).high_water;
  for (uint64_t next = 0; next < end;) {
    const std::vector<RowId> rows =
        ListRows(work, next, end, RowPredicate(), device::kListMost, &next);
    typename Device::Session::Scratch scratch(work);
    RowId* on_device = work.template Take<RowId>(rows.size());
    if (on_device == nullptr) return;
    work.Copy(on_device, rows.data(), rows.size() * sizeof(RowId));
    fn(on_device, rows.size());
  }
}

template <class Device>
ExportPlan DeviceTable<Device>::ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                                         const RowPredicate& where) const {
  if (cold_ != nullptr && cursor >= kColdCursor) return ScanCold(cursor, limit, most, where);
  Work work(*this, &exec);
  const uint64_t all = Read(work).high_water;
  const uint64_t end = cursor < all ? cursor + std::min(all - cursor, most) : all;
  ExportPlan plan;
  uint64_t next = 0;
  plan.rows = ListRows(work, cursor, end, where, limit, &next);
  plan.next_cursor = next < all ? static_cast<int64_t>(next) : -1;
  if (next < all || cold_ == nullptr) return plan;
  plan.next_cursor = static_cast<int64_t>(kColdCursor);
  if (!plan.rows.empty()) return plan;
  return ScanCold(kColdCursor, limit, most - (all - std::min(all, cursor)), where);
}

template <class Device>
void DeviceTable<Device>::ReadToHost(Work& work, const std::vector<RowId>& rows,
                                     const RowColumns<Stamp>& to) const {
  const RowLayout& l = store_.layout;
  const size_t chunk = std::max<size_t>(1, device::kCopyMost / l.stride);
  for (size_t begin = 0; begin < rows.size(); begin += chunk) {
    const size_t n = std::min(chunk, rows.size() - begin);
    typename Device::Session::Scratch scratch(work);
    RowId* ids = work.template Take<RowId>(n);
    const auto column = [&](const void* wanted, size_t bytes) {
      return wanted == nullptr ? nullptr : work.template Take<char>(std::max<size_t>(1, n * bytes));
    };
    const RowColumns<Stamp> copies{column(to.keys, l.key_size),
                                   column(to.vectors, l.vector_bytes()),
                                   reinterpret_cast<float*>(column(to.state, l.state_bytes())),
                                   reinterpret_cast<Stamp*>(column(to.updates, sizeof(Stamp))),
                                   reinterpret_cast<Score*>(column(to.scores, sizeof(Score)))};
    if (!work.status().ok()) return;
    work.Copy(ids, rows.data() + begin, n * sizeof(RowId));
    work.ForRows(n, vector_quads(), device::ReadColumns{View(), ids, copies});
    const auto deliver = [&](void* host, const void* from, size_t bytes) {
      if (host != nullptr) work.Copy(static_cast<char*>(host) + begin * bytes, from, n * bytes);
    };
    deliver(to.keys, copies.keys, l.key_size);
    deliver(to.vectors, copies.vectors, l.vector_bytes());
    deliver(to.state, copies.state, l.state_bytes());
    deliver(to.updates, copies.updates, sizeof(Stamp));
    deliver(to.scores, copies.scores, sizeof(Score));
    if (!work.Synchronize().ok()) return;
  }
}

template <class Device>
Status DeviceTable<Device>::ReadStored(Exec& exec, const std::vector<RowId>& rows,
                                       const RowColumns<Stamp>& to) const {
  Work work(*this, &exec);
  ReadToHost(work, rows, to);
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) {
  loaded.keys.CheckWidth(store_.layout.key_size);
  // Memory need not hold all of the rows.
  const size_t most = cold_ == nullptr ? loaded.keys.size() : std::max<size_t>(1, capacity() / 2);
  for (size_t first = 0; first < loaded.keys.size(); first += most) {
    const size_t n = std::min(most, loaded.keys.size() - first);
    DYNEMB_RETURN_IF_ERROR(LoadPart(exec, loaded.Part(first, n, layout()), tick));
  }
  return Status();
}

template <class Device>
Status DeviceTable<Device>::LoadPart(Exec& exec, const LoadedRows& loaded, Tick tick) {
  const size_t n = loaded.keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, Kind::kWrite));
  Work work(*this, &exec, Work::Reports::kYes);
  const auto bring = [&](const void* from, size_t bytes) {
    char* to = from == nullptr ? nullptr : work.template Take<char>(n * bytes);
    if (to != nullptr) work.Copy(to, from, n * bytes);
    return to;
  };
  const RowLayout& l = store_.layout;
  const KeyArray keys = KeysAt(bring(loaded.keys.data(), l.key_size));
  const char* vectors = bring(loaded.vectors, l.vector_bytes());
  const auto* state = reinterpret_cast<const float*>(bring(loaded.state, l.state_bytes()));
  const auto* updates = reinterpret_cast<const CutTime*>(bring(loaded.updates, sizeof(CutTime)));
  const auto* scores = reinterpret_cast<const CutTime*>(bring(loaded.scores, sizeof(CutTime)));
  RowId* rows = work.template Take<RowId>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  Batch batch = BatchOf(keys, n, now, rows);
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, false));
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kDistinct, device::FillNothing{}));
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(n, vector_quads(),
               device::WriteVectors{View(), rows, nullptr, nullptr, vectors, now});
  work.ForRows(n, device::QuadsOfBytes(l.state_bytes()),
               device::WriteStates{View(), rows, state, initial_state_,
                                   catch_up_.enabled() ? catch_up_.mark() : -1.0f});
  if (loaded.scores != nullptr && scoring_.has_epochs()) {
    for (size_t i = 0; i < n; ++i) scoring_.Adopt(loaded.scores[i]);
  }
  work.ForKeys(n, device::WriteTimes{View(), rows, updates, scores, loaded.base, stamps_,
                                     scoring_.by_time(), scoring_.New(now)});
  return work.Synchronize();
}

template <class Device>
void DeviceTable<Device>::SwapRows(Table* with, Tick tick) {
  auto* other = static_cast<DeviceTable*>(with);
  WaitForReader();
  other->WaitForReader();
  Work work(*this, nullptr);
  SaveAll(work);
  work.After(other->stream_);
  other->SaveAll(work);
  device::Counters mine = Read(work);
  device::Counters theirs = ToHost(work, other->counters(), 1)[0];
  if (!work.status().ok()) return;  // nothing has changed; a later call reports the failure
  work.Changes();
  std::swap(store_, other->store_);
  std::swap(initial_state_of_, other->initial_state_of_);
  std::swap(initial_state_, other->initial_state_);
  if (options_.admission == other->options_.admission) {
    std::swap(admission_counters_, other->admission_counters_);
  }
  std::swap(steps_, other->steps_);
  SwapColdBase(other);
  std::swap(bounds_, other->bounds_);
  // Each table keeps its event counters; the numbers of rows move with the rows.
  std::swap(mine.high_water, theirs.high_water);
  std::swap(mine.free_count, theirs.free_count);
  work.Copy(counters(), &mine, sizeof(mine));
  work.Copy(other->counters(), &theirs, sizeof(theirs));
  (void)work.Synchronize();
  first_mail_ = batch_ + 1;
  other->first_mail_ = other->batch_ + 1;
  stamps_.ForgetBatch();
  other->stamps_.ForgetBatch();
  RestartChanges(tick);
  if (other->tracking()) other->RestartChanges(tick);
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_STATE_H_
