// ColdTable's part of flushes (cold_rows.h): the record of a table, besides its rows.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/bytes.h"
#include "cc/table/cold_table.h"

namespace dynemb {
namespace {

struct FlushRecord {
  // The options on which the meaning of rows depends.
  KeyType key_type;
  DType dtype;
  int64_t dim;
  EvictStrategy strategy;
  // The options of the marks and of the counters.
  int64_t ttl;
  TtlClock ttl_clock;
  int64_t admission_lines;
  FlushInfo info;
  Tick base;  // of the stamps
  uint32_t epoch;
  uint64_t epoch_steps;  // in this epoch
  uint64_t additions;    // that draw random numbers (rounding.h)
  std::vector<int64_t> expiry_marks;
  int64_t first_admission_line;
  std::vector<uint64_t> admission;
  std::vector<double> steps;  // CatchUp::SaveAll
  uint64_t loaded_step;

  std::string Encoded() const {
    ByteWriter out;
    out.Put(key_type);
    out.Put(dtype);
    out.Put(dim);
    out.Put(strategy);
    out.Put(ttl);
    out.Put(ttl_clock);
    out.Put(admission_lines);
    out.Put(info.tick);
    out.Put(info.utc_ns);
    out.PutText(info.state_spec.optimizer);
    out.PutArray(info.state_spec.widths);
    out.PutArray(info.state_spec.inits);
    out.Put(base);
    out.Put(epoch);
    out.Put(epoch_steps);
    out.Put(additions);
    out.PutArray(expiry_marks);
    out.Put(first_admission_line);
    out.PutArray(admission);
    out.PutArray(steps);
    out.Put(loaded_step);
    return out.bytes();
  }

  // Returns whether the bytes are a record.
  bool Decode(const std::string& bytes) {
    ByteReader in(bytes);
    key_type = in.Get<KeyType>();
    dtype = in.Get<DType>();
    dim = in.Get<int64_t>();
    strategy = in.Get<EvictStrategy>();
    ttl = in.Get<int64_t>();
    ttl_clock = in.Get<TtlClock>();
    admission_lines = in.Get<int64_t>();
    info.tick = in.Get<Tick>();
    info.utc_ns = in.Get<int64_t>();
    info.state_spec.optimizer = in.GetText();
    info.state_spec.widths = in.GetArray<int64_t>();
    info.state_spec.inits = in.GetArray<float>();
    base = in.Get<Tick>();
    epoch = in.Get<uint32_t>();
    epoch_steps = in.Get<uint64_t>();
    additions = in.Get<uint64_t>();
    expiry_marks = in.GetArray<int64_t>();
    first_admission_line = in.Get<int64_t>();
    admission = in.GetArray<uint64_t>();
    steps = in.GetArray<double>();
    loaded_step = in.Get<uint64_t>();
    return in.ok() && in.at_end();
  }

  // FailedPrecondition names the option that differs.
  Status CheckOptions(const std::string& folder, const TableOptions& options) const {
    const char* option = nullptr;
    if (key_type != options.key_type) option = "key_type";
    if (dtype != options.dtype) option = "dtype";
    if (dim != options.dim) option = "dimension";
    if (strategy != options.evict_strategy) option = "evict_strategy";
    if (option == nullptr) return Status();
    return FailedPrecondition(folder + " has the rows of a table with another " + option +
                              " than table '" + options.name + "'");
  }
};

}  // namespace

Status ColdTable::Flush(Exec& exec, const std::string& folder, Tick tick, int64_t utc_ns) {
  if (cold_ == nullptr) return CheckHasFiles();
  DYNEMB_RETURN_IF_ERROR(MendMarks(exec));
  FlushRecord record;
  record.key_type = options_.key_type;
  record.dtype = options_.dtype;
  record.dim = options_.dim;
  record.strategy = options_.evict_strategy;
  record.ttl = options_.ttl;
  record.ttl_clock = options_.ttl_clock;
  record.admission_lines = options_.admission.lines;
  record.info = {tick, utc_ns, state_spec_};
  record.base = stamps_.base();
  record.epoch = scoring_.epoch();
  record.epoch_steps = scoring_.steps();
  record.additions = additions_;
  record.expiry_marks = ExpiryMarks(tick);
  DYNEMB_RETURN_IF_ERROR(CopyAdmission(exec, &record.admission, &record.first_admission_line));
  record.steps = catch_up_.SaveAll();
  record.loaded_step = catch_up_.loaded();
  DYNEMB_RETURN_IF_ERROR(RewriteCondemned());
  // Even if it fails: a restart may find a manifest of which only the sync has failed.
  flushes_.Written(folder);
  return cold_->Flush(folder, record.Encoded(),
                      [&](const ColdRows::AddHotFn& add) { return AddHotRows(exec, add); });
}

Status ColdTable::KeepFlush(const std::string& folder) {
  if (cold_ == nullptr) return CheckHasFiles();
  flushes_.Keep(folder);
  return Status();
}

Status ColdTable::Restore(Exec& exec, const std::string& folder, FlushInfo* info) {
  if (cold_ == nullptr) return CheckHasFiles();
  if (size() != 0) {
    return FailedPrecondition("table '" + options_.name + "' has rows, but only an empty table " +
                              "can take the rows of a flush");
  }
  std::string bytes;
  DYNEMB_RETURN_IF_ERROR(cold_->ReadFlush(folder, &bytes));
  FlushRecord record;
  if (!record.Decode(bytes)) return DataLoss(folder + "/manifest has no record of a table");
  DYNEMB_RETURN_IF_ERROR(record.CheckOptions(folder, options_));
  CatchUp steps(record.info.state_spec, options_.dim);
  if (steps.enabled()) {
    const Status parsed = CatchUp::Parse(record.steps, record.info.state_spec, options_.dim,
                                         record.info.tick, &steps);
    if (!parsed.ok()) return DataLoss(folder + "/manifest: " + parsed.message());
    steps.set_loaded(record.loaded_step);
  }
  DYNEMB_RETURN_IF_ERROR(ResetState(exec, record.info.state_spec));
  std::vector<uint64_t> forgotten;
  DYNEMB_RETURN_IF_ERROR(cold_->Restore(folder, &forgotten));
  flushes_.Continue(folder, std::move(forgotten));
  stamps_.Restart(record.base);
  scoring_.Restart(record.epoch, record.epoch_steps);
  additions_ = record.additions;
  if (steps.enabled()) DYNEMB_RETURN_IF_ERROR(CopySteps(exec, steps));
  catch_up_ = std::move(steps);
  if (catch_up_.enabled()) MarkNewRows(exec, catch_up_.mark());
  // If the clock or the counters differ, they are reset.
  if (expiry_.active() && record.ttl != 0 && record.ttl_clock == options_.ttl_clock) {
    DYNEMB_RETURN_IF_ERROR(SetExpiryMarks(record.expiry_marks));
  }
  if (options_.admission.rule == Admit::kFrequency &&
      record.admission_lines == options_.admission.lines && !record.admission.empty()) {
    const auto lines =
        static_cast<int64_t>(record.admission.size() / AdmissionCounters::kLineWords);
    DYNEMB_RETURN_IF_ERROR(
        LoadAdmission(record.admission.data(), record.first_admission_line, lines, false));
  }
  RestartChanges(record.info.tick);
  *info = std::move(record.info);
  return Status();
}

}  // namespace dynemb
