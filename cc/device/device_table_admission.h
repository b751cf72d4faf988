// DeviceTable: admission (cc/table/admission.h), with the counters in the device's memory.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_ADMISSION_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_ADMISSION_H_

#include <algorithm>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_state.h"
#include "cc/device/device_table_work.h"
#include "cc/device/kernels_admission.h"
#include "cc/device/parts.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
Status DeviceTable<Device>::InitAdmission(Work& work, const AdmissionOptions& options) {
  admission_.Configure(options, options_.seed);
  if (!admission_.counts()) return Status();
  admission_lines_ = {options.lines, options.first_line, options.num_lines};
  DYNEMB_RETURN_IF_ERROR(admission_counters_.Reserve(*device_, CounterBytes()));
  DYNEMB_RETURN_IF_ERROR(admission_counters_.Commit(CounterBytes()));
  work.Fill(admission_counters_.data(), 0, CounterBytes());
  return work.status();
}

template <class Device>
device::AdmissionView DeviceTable<Device>::AdmissionAt() const {
  device::AdmissionView view;
  view.rule = options_.admission.rule;
  view.absent_row = admission_.AbsentRow();
  view.absent_is_zero = admission_.AbsentIsZero();
  view.times = admission_.times();
  view.counters = reinterpret_cast<uint64_t*>(admission_counters_.data());
  view.lines = admission_lines_;
  view.draws = admission_.Draws();
  return view;
}

template <class Device>
bool DeviceTable<Device>::AnyAdmission(const Batch& batch) {
  return std::any_of(batch.tables.begin(), batch.tables.end(),
                     [](const DeviceTable* table) { return table->admission_.enabled(); });
}

template <class Device>
Status DeviceTable<Device>::Admit(Work& work, Batch& batch, InsertArrays* in) {
  if (!batch.admits || !AnyAdmission(batch)) return Status();
  Phase phase("admit");
  const size_t n = batch.size();
  uint64_t num_lines = 0;  // of all tables
  for (const DeviceTable* table : batch.tables) {
    num_lines += static_cast<uint64_t>(table->admission_lines_.num);
  }
  const device::TableViews& tables = ViewsOf(work, batch);
  auto* const flags = work.template Take<uint32_t>(n + 1);
  const typename Device::Session::Scratch scratch(work);
  auto* const times = work.template Take<uint64_t>(n);
  auto* const lines = work.template Take<uint64_t>(n);
  auto* const positions = work.template Take<uint32_t>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  const device::AskedKeys asked{tables, batch.keys, batch.rows, in->places,
                                in->of, in->sums,   times};
  work.Fill(times, 0, n * sizeof(*times));
  work.Fill(lines, 0xFF, n * sizeof(*lines));
  work.ForEach(n, device::CountOccurrences{asked, batch.times});
  work.ForEach(n + 1, device::ListLines{asked, n, flags, lines, positions});
  if (num_lines != 0) {
    // The bits of kNoLine are not below the bits of any line.
    work.SortPairs(lines, positions, n, device::BitsBelow(num_lines + 1));
    work.ForEach(n, device::CountLines{asked, n, lines, positions, flags});
  }
  work.ForEach(device::TallyItems(n), device::CountUnadmitted{asked, flags});
  work.ExclusiveSum(flags, n + 1);
  in->sums = flags;
  return work.status();
}

template <class Device>
std::vector<uint32_t> DeviceTable<Device>::CountsOf(Work& work, KeyArray keys, size_t n) const {
  if (!admission_.counts()) return std::vector<uint32_t>(n);
  auto* const counts = work.template Take<uint32_t>(n);
  if (counts != nullptr) work.ForEach(n, device::ReadCounts{AdmissionAt(), keys, counts});
  return ToHost(work, counts, n);
}

template <class Device>
Status DeviceTable<Device>::ForgetCounts(Work& work, KeyArray keys, size_t n) {
  if (!admission_.counts()) return work.status();
  const typename Device::Session::Scratch scratch(work);
  auto* const lines = work.template Take<uint64_t>(n);
  auto* const positions = work.template Take<uint32_t>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  const device::AdmissionView admission = AdmissionAt();
  work.ForEach(n, device::ListLinesOfKeys{admission, keys, lines, positions});
  work.SortPairs(lines, positions, n,
                 device::BitsBelow(static_cast<uint64_t>(admission_lines_.num)));
  work.ForEach(n, device::ForgetCounts{admission, keys, n, lines, positions});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::LoadAdmission(const uint64_t* saved, int64_t first, int64_t num,
                                          bool merge) {
  constexpr auto kWords = static_cast<int64_t>(AdmissionLine::kWords);
  constexpr auto kMost = static_cast<int64_t>(device::kCopyMost / AdmissionCounters::kLineBytes);
  if (!admission_.counts()) return Table::LoadAdmission(saved, first, num, merge);
  DYNEMB_RETURN_IF_ERROR(AdmissionCounters::CheckLines(saved, first, num));
  DYNEMB_RETURN_IF_ERROR(Error());
  const AdmissionLines& held = admission_lines_;
  const int64_t end = std::min(first + num, held.first + held.num);
  Work work(*this, nullptr, Work::Reports::kYes);
  for (int64_t line = std::max(first, held.first); line < end; line += kMost) {
    const int64_t n = std::min(kMost, end - line);
    const uint64_t* from = saved + (line - first) * kWords;
    uint64_t* const to = AdmissionAt().LineAt(static_cast<uint64_t>(line - held.first));
    std::vector<uint64_t> merged;
    if (merge) {
      merged = ToHost(work, to, static_cast<size_t>(n * kWords));
      DYNEMB_RETURN_IF_ERROR(work.status());
      AdmissionCounters::LoadLines(from, n, true, merged.data());
      from = merged.data();
    }
    work.Copy(to, from, static_cast<size_t>(n * kWords) * sizeof(uint64_t));
  }
  return work.Synchronize();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_ADMISSION_H_
