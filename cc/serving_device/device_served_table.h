// DeviceServedTable: a served table (cc/serving/served_table.h) whose rows a device can access. It
// never changes, so that lookups on several streams need neither a lock nor an order.
//
//   sources   one for each level and each shard, as on the host. A table shares the sources that
//             the table of an earlier state has.
//   vectors   in device memory as far as max_device_bytes allow. Seven eighths of them are for the
//             base, for the first rows of each shard; the rest is for levels. Kernels read all
//             other vectors in page-locked host memory.
//
// Contract. The arrays of calls are in the device's memory; Exec gives the stream. Lookups give
// work to the stream, and do not wait for it; stats() waits. A call that returns no Status reports
// its failure by Error() to the thread that made the call. All files are verified before the table
// exists. Vectors have the bits of ServedTable's, except for the bits of a NaN. The memory of a
// source is freed with the last table that has it; that waits for all work of the device.
#ifndef DYNEMB_SERVING_DEVICE_DEVICE_SERVED_TABLE_H_
#define DYNEMB_SERVING_DEVICE_DEVICE_SERVED_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/parts.h"
#include "cc/serving/read_only_table.h"
#include "cc/serving/served_table.h"
#include "cc/serving_device/call_failure.h"
#include "cc/serving_device/served_kernels.h"
#include "cc/serving_device/served_source.h"
#include "cc/serving_device/served_view.h"

namespace dynemb {

template <class Device>
class DeviceServedTable final : public ReadOnlyTable {
 public:
  using Session = typename Device::Session;

  // As ServedPlace::Place.
  static Status Make(Device& device, const ServedTable& table, const DeviceServedTable* before,
                     std::shared_ptr<Table>* made);

  const RowLayout& layout() const override { return layout_; }
  uint64_t size() const override { return size_; }
  TableStats stats() const override;
  // Of the last call of this thread, if that was one of this table; once.
  Status Error() const override {
    CallFailure& last = LastCall();
    return last.table == this ? std::exchange(last, CallFailure()).status : Status();
  }

  void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  void Contains(Exec& exec, KeySpan keys, bool* found) const override;
  void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector, void* vectors,
              RowId* rows) override;
  void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state, bool* found) const override;
  void Changed(Exec& exec, const RowId*, const RowId*, size_t n, Tick, Tick,
               bool* changed) const override;
  Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override {
    Find(exec, keys, tick, rows);
    return Error();
  }
  Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors, RowId* rows) override {
    Lookup(exec, keys, tick, nullptr, vectors, rows);
    return Error();
  }
  Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t*, Tick tick, void* vectors,
                       RowId* rows) override {
    return LookupOrInsert(exec, keys, tick, vectors, rows);
  }

  // The codes and the addresses of a batch (served_kernels.h).
  struct Found {
    uint32_t* codes = nullptr;
    const char** vectors = nullptr;
  };
  // Finds the ids of a call: those of ids[p] begin at begins[p], in the arrays of *found too, which
  // are taken from the session. `found` may be null. `counts`: as of FindServed.
  static Status FindIds(Session& session, const std::vector<device::ServedIds>& ids,
                        const std::vector<uint32_t>& begins, bool counts, Found* found);

  const device::ServedView& view() const { return view_; }
  // The vectors of ids that begin at first_id in the arrays of a ServedVectors.
  device::ServedVectors::Part VectorsOf(const void* keys, uint32_t first_id) const {
    // Memory of a device begins at multiples of 256 bytes.
    const bool whole = IsWhole(view_.dtype, view_.dim, nullptr);
    return {view_, KeysAt(keys), first_id, view_.absent_row == kSkippedRow, whole};
  }
  KeyArray KeysAt(const void* keys) const { return {keys, SizeOf(options_.key_type)}; }
  // InvalidArgument if these are too many ids for a call: positions are told apart from row ids
  // that belong to no row.
  static Status CheckBatch(size_t ids) {
    if (ids <= kMostRows) return Status();
    return InvalidArgument("at most " + std::to_string(kMostRows) + " ids in one call, got " +
                           std::to_string(ids));
  }

 private:
  using Source = DeviceSource<Device>;

  // What the tables of all states share.
  struct Common {
    typename Device::Range memory;  // two counters, the initializer's runs and the default vector
    device::ServedView view;        // without sources
  };

  explicit DeviceServedTable(Device& device) : device_(device) {}
  Status Init(const ServedTable& table, const DeviceServedTable* before);
  Status MakeCommon(Session& session, const ServedTable& table);
  Status BringSources(const ServedTable& table, const DeviceServedTable* before);
  size_t vector_quads() const { return device::QuadsOfBytes(view_.vector_bytes()); }

  // Finds a batch of keys; *found is taken from the session. False, and Error() says why, if it
  // cannot.
  bool FindKeys(Session& session, const device::ServedView& view, KeySpan keys, bool counts,
                RowId* rows, bool* contains, Found* found) const;
  // The result of a call, for Error().
  void Finish(const Status& status) const { LastCall() = {this, status}; }

  Device& device_;
  RowLayout layout_;
  uint64_t size_ = 0, slots_ = 0;
  std::shared_ptr<const Common> common_;
  std::vector<std::shared_ptr<const Source>> sources_;
  typename Device::Range source_views_;
  device::ServedView view_;
};

template <class Device>
Status DeviceServedTable<Device>::Make(Device& device, const ServedTable& table,
                                       const DeviceServedTable* before,
                                       std::shared_ptr<Table>* made) {
  std::shared_ptr<DeviceServedTable> placed(new DeviceServedTable(device));
  DYNEMB_RETURN_IF_ERROR(placed->Init(table, before));
  *made = std::move(placed);
  return Status();
}

template <class Device>
Status DeviceServedTable<Device>::Init(const ServedTable& table, const DeviceServedTable* before) {
  options_ = table.options();
  layout_ = table.layout();
  size_ = table.size();
  slots_ = table.rows().slots();
  if (before != nullptr) {
    common_ = before->common_;
  } else {
    // Operators do not wait for the device's own stream, so that this call does.
    Session session(device_, {});
    DYNEMB_RETURN_IF_ERROR(MakeCommon(session, table));
    DYNEMB_RETURN_IF_ERROR(session.Synchronize());
  }
  view_ = common_->view;
  return BringSources(table, before);
}

template <class Device>
Status DeviceServedTable<Device>::MakeCommon(Session& session, const ServedTable& table) {
  auto common = std::make_shared<Common>();
  const std::vector<InitRun>& runs = table.initializer().runs();
  const std::vector<char>& vector = table.default_vector();
  constexpr size_t kAlignment = 256;
  const size_t runs_at = kAlignment;
  const size_t runs_bytes = runs.size() * sizeof(InitRun);
  const size_t vector_at = runs_at + (runs_bytes + kAlignment - 1) / kAlignment * kAlignment;
  DYNEMB_RETURN_IF_ERROR(AllocateRange(device_, vector_at + vector.size(),
                                       "the options of table '" + options_.name + "'",
                                       &common->memory));
  char* const memory = common->memory.data();
  session.Fill(memory, 0, runs_at);
  session.Copy(memory + runs_at, runs.data(), runs_bytes);
  if (!vector.empty()) session.Copy(memory + vector_at, vector.data(), vector.size());
  device::ServedView& view = common->view;
  view.dtype = options_.dtype;
  view.dim = options_.dim;
  view.default_vector = vector.empty() ? nullptr : memory + vector_at;
  view.absent_is_zero = vector.empty() && table.served().absent != Unadmitted::kInitial;
  view.absent_row = table.AbsentRow();
  view.initial = {table.initializer().seed(), options_.dim,
                  reinterpret_cast<const InitRun*>(memory + runs_at),
                  static_cast<uint32_t>(runs.size())};
  view.hits = reinterpret_cast<uint64_t*>(memory);
  view.misses = view.hits + 1;
  common_ = std::move(common);
  return session.status();
}

template <class Device>
Status DeviceServedTable<Device>::BringSources(const ServedTable& table,
                                               const DeviceServedTable* before) {
  const std::vector<RowSource>& sources = table.rows().sources();
  const size_t levels = table.rows().num_levels();
  const uint64_t most = table.served().max_device_bytes;
  uint64_t base_bytes = 0, level_bytes = 0;  // of vectors; in device memory, those of levels
  for (size_t s = levels; s < sources.size(); ++s) {
    base_bytes += sources[s].live * sources[s].row_bytes;
  }
  const uint64_t most_of_base = most - most / 8;
  const double share = base_bytes <= most_of_base ? 1.0 : double(most_of_base) / double(base_bytes);
  const uint64_t most_of_levels = most - std::min(base_bytes, most_of_base);
  std::vector<device::ServedSource> views;
  // The oldest first: a level is older, and has more rows, than those before it.
  sources_.resize(sources.size());
  for (size_t s = sources.size(); s-- > 0;) {
    const RowSource& source = sources[s];
    std::shared_ptr<const Source>& at = sources_[s];
    if (before != nullptr) {
      for (const auto& known : before->sources_) {
        if (known->Is(source)) at = known;
      }
    }
    const bool is_level = s < levels;
    if (at == nullptr) {
      const uint64_t bytes = source.live * source.row_bytes;
      const uint64_t left = is_level ? most_of_levels - std::min(most_of_levels, level_bytes)
                            : share == 1.0
                                ? bytes
                                : static_cast<uint64_t>(share * static_cast<double>(bytes));
      DYNEMB_RETURN_IF_ERROR(Source::Make(device_, table.rows(), source, left, &at));
    }
    if (is_level) level_bytes += at->device_bytes();
  }
  for (const auto& source : sources_) views.push_back(source->view());
  if (views.empty()) return Status();
  const size_t bytes = views.size() * sizeof(device::ServedSource);
  DYNEMB_RETURN_IF_ERROR(AllocateRange(
      device_, bytes, "the sources of table '" + options_.name + "'", &source_views_));
  Session session(device_, {});
  session.Copy(source_views_.data(), views.data(), bytes);
  view_.sources = reinterpret_cast<const device::ServedSource*>(source_views_.data());
  view_.num_sources = static_cast<uint32_t>(views.size());
  return session.Synchronize();
}

template <class Device>
bool DeviceServedTable<Device>::FindKeys(Session& session, const device::ServedView& view,
                                         KeySpan keys, bool counts, RowId* rows, bool* contains,
                                         Found* found) const {
  keys.CheckWidth(SizeOf(options_.key_type));
  if (const Status status = CheckBatch(keys.size()); !status.ok()) {
    Finish(status);
    return false;
  }
  const Status status = FindIds(session, {{view, KeysAt(keys.data()), rows, contains}},
                                {0, static_cast<uint32_t>(keys.size())}, counts, found);
  Finish(status);
  return status.ok();
}

template <class Device>
Status DeviceServedTable<Device>::FindIds(Session& session,
                                          const std::vector<device::ServedIds>& ids,
                                          const std::vector<uint32_t>& begins, bool counts,
                                          Found* found) {
  const auto parts = device::ToDevice(session, ids, begins);
  const size_t n = begins.back();
  Found none;
  Found& to = found != nullptr ? *found : none;
  if (found != nullptr) {
    to = {session.template Take<uint32_t>(n), session.template Take<const char*>(n)};
  }
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(n, device::FindServed{parts, to.codes, to.vectors, counts});
  return session.status();
}

template <class Device>
void DeviceServedTable<Device>::Find(Exec& exec, KeySpan keys, Tick, RowId* rows) {
  Session session(device_, Device::StreamOf(exec));
  device::ServedView view = view_;
  view.absent_row = kNoRow;
  FindKeys(session, view, keys, false, rows, nullptr, nullptr);
}

template <class Device>
void DeviceServedTable<Device>::Contains(Exec& exec, KeySpan keys, bool* found) const {
  Session session(device_, Device::StreamOf(exec));
  FindKeys(session, view_, keys, false, nullptr, found, nullptr);
}

template <class Device>
void DeviceServedTable<Device>::Lookup(Exec& exec, KeySpan keys, Tick, const void* default_vector,
                                       void* vectors, RowId* rows) {
  Session session(device_, Device::StreamOf(exec));
  device::ServedView view = view_;
  if (default_vector != nullptr) {
    view.default_vector = static_cast<const char*>(default_vector);
    view.absent_row = kNoRow;
  }
  Found found;
  if (!FindKeys(session, view, keys, true, rows, nullptr, &found)) return;
  session.ForRows(keys.size(), vector_quads(),
                  device::CopyServed{{found.codes, found.vectors, true},
                                     VectorsOf(keys.data(), 0),
                                     static_cast<char*>(vectors)});
  Finish(session.status());
}

template <class Device>
void DeviceServedTable<Device>::ReadRows(Exec& exec, KeySpan keys, float* vectors, float*,
                                         bool* contains) const {
  Session session(device_, Device::StreamOf(exec));
  Found found;
  if (!FindKeys(session, view_, keys, false, nullptr, contains, &found)) return;
  session.ForRows(
      keys.size(), vector_quads(),
      device::LoadServed{
          {found.codes, found.vectors, false}, VectorsOf(keys.data(), 0), contains, vectors});
  Finish(session.status());
}

template <class Device>
void DeviceServedTable<Device>::Changed(Exec& exec, const RowId*, const RowId*, size_t n, Tick,
                                        Tick, bool* changed) const {
  Session session(device_, Device::StreamOf(exec));
  session.Fill(changed, 1, n);
  Finish(session.status());
}

template <class Device>
TableStats DeviceServedTable<Device>::stats() const {
  TableStats s;
  s.size = size_;
  s.slots = slots_;
  for (const auto& source : sources_) {
    s.index_bytes += source->index_bytes();
    s.row_bytes += source->device_bytes() + source->host_bytes();
    s.device_rows += source->view().split;
  }
  s.metadata_bytes = s.index_bytes;
  Session session(device_, {});
  auto* const counts = session.template Pinned<uint64_t>(2);
  if (counts != nullptr) session.Copy(counts, view_.hits, 2 * sizeof(*counts));
  if (session.Synchronize().ok() && counts != nullptr) {
    s.hits = counts[0];
    s.misses = counts[1];
  }
  return s;
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_DEVICE_SERVED_TABLE_H_
