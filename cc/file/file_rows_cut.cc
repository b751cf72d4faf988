// FileRows' part of cuts (cc/table/changes.h).
#include <algorithm>
#include <new>
#include <utility>

#include "cc/file/file_rows.h"

namespace dynemb {

bool FileRows::IsOfCut(ColdPlace place) const {
  if (cut_ == nullptr) return false;
  const uint32_t number = log_.NumberOf(place), row = log_.RowOf(place);
  return number < cut_->segments.size() && cut_->segments[number] == log_.segments()[number] &&
         row / 64 < cut_->todo[number].size() &&
         (cut_->todo[number][row / 64] >> row % 64 & 1) != 0;
}

void FileRows::KeepTimes(const SlotIndex::Entry& entry) noexcept {
  try {
    cut_->gone[entry.place] = entry.times;
  } catch (const std::bad_alloc&) {
    // The cut delivers the score that the row had when it left memory.
  }
}

void FileRows::BeginCut(const TimesFn& chosen) {
  auto cut = std::make_unique<ColdCut>();
  cut->layout = layout_;
  cut->places = log_.places();
  cut->segments = log_.segments();
  cut->todo.resize(cut->segments.size());
  for (size_t s = 0; s < cut->segments.size(); ++s) {
    if (cut->segments[s] != nullptr) cut->todo[s].resize((cut->segments[s]->rows() + 63) / 64);
  }
  uint64_t left = 0;
  index_.ForFrom(0, [&](uint64_t, const SlotIndex::Entry* entry) {
    if (!chosen(entry->times)) return true;
    const uint32_t row = log_.RowOf(entry->place);
    cut->todo[log_.NumberOf(entry->place)][row / 64] |= uint64_t{1} << row % 64;
    ++left;
    return true;
  });
  cut->left = left;
  cut_ = std::move(cut);
}

uint64_t FileRows::CutRows() const { return cut_ == nullptr ? 0 : cut_->left.load(); }

std::vector<ColdPlace> FileRows::PlanCut(size_t limit) const {
  std::vector<ColdPlace> plan;
  if (CutRows() == 0) return plan;
  for (size_t s = cut_->first; s < cut_->todo.size(); ++s) {
    const std::vector<uint64_t>& words = cut_->todo[s];
    for (size_t w = 0; w < words.size(); ++w) {
      for (uint64_t word = words[w]; word != 0; word &= word - 1) {
        if (plan.size() == limit) return plan;
        const auto bit = static_cast<uint32_t>(__builtin_ctzll(word));
        plan.push_back(
            cut_->places.At(static_cast<uint32_t>(s), static_cast<uint32_t>(w * 64 + bit)));
      }
    }
  }
  return plan;
}

Status FileRows::ReadCut(const std::vector<ColdPlace>& plan, const RowFn& fn) {
  std::vector<Candidate> candidates;
  candidates.reserve(plan.size());
  for (size_t i = 0; i < plan.size(); ++i) candidates.push_back({i, plan[i], {}});
  DYNEMB_RETURN_IF_ERROR(ReadCandidates(
      cut_->segments, cut_->places, cut_->layout, candidates,
      [&](const Candidate& candidate, const StoredRow& stored, const char* content) {
        // Scores change while the row is cold, too.
        RowTimes times{0, static_cast<Score>(stored.score)};
        const auto take = [&](const SlotIndex::Entry* entry) {
          if (entry->place == candidate.place) times = entry->times;
        };
        const auto gone = cut_->gone.find(candidate.place);
        const uint32_t number = cut_->places.NumberOf(candidate.place);
        if (gone != cut_->gone.end()) {
          times = gone->second;
        } else if (number < log_.segments().size() &&
                   log_.segments()[number] == cut_->segments[number]) {
          index_.ForEach(HashOf(stored.key), take);
        } else {
          cut_->cleared.ForEach(HashOf(stored.key), take);
        }
        fn(candidate.i, {stored.key, times, candidate.place, stored.updated, content});
      }));
  for (const ColdPlace place : plan) {
    const uint32_t row = cut_->places.RowOf(place);
    cut_->todo[cut_->places.NumberOf(place)][row / 64] &= ~(uint64_t{1} << row % 64);
  }
  const auto is_read = [](const std::vector<uint64_t>& words) {
    return std::all_of(words.begin(), words.end(), [](uint64_t word) { return word == 0; });
  };
  while (cut_->first < cut_->todo.size() && is_read(cut_->todo[cut_->first])) {
    cut_->todo[cut_->first++] = {};
  }
  cut_->left -= plan.size();
  return Status();
}

void FileRows::EndCut() { cut_.reset(); }

void FileRows::SwapCuts(ColdRows* other) noexcept {
  // A cut has its segments. The times that are only in the index are kept with it, too, as far as
  // there is memory.
  auto* const with = static_cast<FileRows*>(other);
  for (FileRows* rows : {this, with}) {
    if (rows->cut_ == nullptr) continue;
    rows->index_.ForFrom(0, [&](uint64_t, const SlotIndex::Entry* entry) {
      if (rows->IsOfCut(entry->place)) rows->KeepTimes(*entry);
      return true;
    });
  }
  std::swap(cut_, with->cut_);
}

}  // namespace dynemb
