#include "cc/table/catch_up.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

// A record of Save before its runs: two numbers of steps, a flag, Hyper, the factors of the states.
constexpr size_t kHyperAt = 3;
constexpr size_t kRatesAt = kHyperAt + kHyperSize;
constexpr size_t kHead = kRatesAt + CatchUpView::kMostRates;
constexpr size_t kRunNumbers = 3;

// The optimizer of a state, by the state's name: the optimizer's name, then its flags.
bool ParseState(const std::string& state, OptimizerKind* kind, OptimizerFlags* flags) {
  std::istringstream words(state);
  std::string name;
  words >> name;
  const std::vector<std::string> rest{std::istream_iterator<std::string>(words), {}};
  return ParseOptimizer(name, rest, kind, flags).ok();
}

// The factor by which the formula x + (0 - x) * one_minus_beta multiplies x.
double Kept(float one_minus_beta) { return 1.0 - static_cast<double>(one_minus_beta); }

// The factors by which a step without a gradient multiplies each state.
std::vector<double> RatesOf(OptimizerKind kind, OptimizerFlags flags,
                            const OptimizerCoefficients& c) {
  switch (kind) {
    case OptimizerKind::kSgd:
      if (!flags.momentum) return {};
      return {c.momentum};
    case OptimizerKind::kAdam:
      return {Kept(c.one_minus_beta_1), Kept(c.one_minus_beta_2)};
    case OptimizerKind::kAdamax:
      return {Kept(c.one_minus_beta_1), c.beta_2};
    case OptimizerKind::kRmsprop: {
      std::vector<double> rates{c.beta_1};
      if (flags.momentum) rates.push_back(c.momentum);
      if (flags.centered) rates.push_back(c.beta_1);
      return rates;
    }
    case OptimizerKind::kAdadelta:
      return {c.beta_1, c.beta_1};
    default:
      return {};
  }
}

// The ratio of each term of the drift of a row to the one before; 0 if the row does not drift.
double DriftRatio(OptimizerKind kind, OptimizerFlags flags, const Hyper& h) {
  const double beta_1 = h.beta_1, beta_2 = h.beta_2;
  switch (kind) {
    case OptimizerKind::kSgd:
    case OptimizerKind::kRmsprop:
      return flags.momentum ? h.momentum : 0.0;
    case OptimizerKind::kAdam:
      return flags.amsgrad ? beta_1 : beta_1 / std::sqrt(beta_2);
    case OptimizerKind::kAdamax:
      return beta_1 / beta_2;
    default:
      return 0.0;
  }
}

// J of catch_up.h.
uint64_t MostSingleSteps(OptimizerKind kind, OptimizerFlags flags, const Hyper& h) {
  constexpr double kSmallest = 1.5e-8;  // 2^-26
  const double ratio = DriftRatio(kind, flags, h);
  if (ratio <= 0.0) return 0;
  if (!(ratio < 1.0)) return ~uint64_t{0};
  return static_cast<uint64_t>(std::ceil(std::log(kSmallest) / std::log(ratio)));
}

DYNEMB_CLONES void Scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

uint64_t NextRecord() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

bool IsCount(double x, double most) { return x >= 0 && x <= most && x == std::floor(x); }

}  // namespace

CatchUp::CatchUp(const StateSpec& spec, int64_t dim) : dim_(dim), state_width_(spec.width()) {
  enabled_ = ParseState(spec.optimizer, &kind_, &flags_) && flags_.catch_up &&
             spec.widths == StateWidths(kind_, flags_, dim);
  if (enabled_) zeros_.resize(static_cast<size_t>(dim));
}

CatchUpView CatchUp::View() const {
  CatchUpView view{};
  view.kind = kind_;
  view.flags = flags_;
  view.hyper = hyper_;
  view.coefficients = optimizer_.coefficients();
  view.step = step_;
  view.first = first_of_runs();
  view.bound = bound_;
  view.num_rates = static_cast<int>(rates_.size());
  std::copy(rates_.begin(), rates_.end(), view.rates);
  view.runs = runs_.data();
  view.num_runs = runs_.size();
  view.alphas = alphas_.empty() ? nullptr : alphas_.data();
  view.alphas_from = alphas_from_;
  return view;
}

void CatchUp::Bring(float* vector, float* state) const {
  const uint64_t missed = Missed(state);
  if (missed == 0) return;
  const CatchUpView view = View();
  view.ForSingleSteps(missed, [&](const OptimizerCoefficients& c) {
    optimizer_.Apply(c, vector, state, zeros_.data());
  });
  const CatchUpView::Tail tail = view.TailOf(missed);
  if (tail.decay != 1.0f) Scale(vector, dim_, tail.decay);
  for (int k = 0; k < view.num_rates; ++k) {
    if (tail.factors[k] != 1.0f) Scale(state + k * dim_, dim_, tail.factors[k]);
  }
  state[state_width_ - 1] = mark();
}

void CatchUp::BringColumns(Exec& exec, const RowLayout& layout, size_t n, void* vectors,
                           float* state) const {
  constexpr size_t kGrain = 256;
  if (!active()) return;
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    std::vector<float> unpacked(static_cast<size_t>(dim_));
    for (size_t i = begin; i < end; ++i) {
      float* const of_row = state + i * static_cast<size_t>(state_width_);
      if (!IsBehind(of_row)) continue;
      char* const packed =
          vectors == nullptr ? nullptr : static_cast<char*>(vectors) + i * layout.vector_bytes();
      if (packed != nullptr) LoadVector(layout.dtype, packed, dim_, unpacked.data());
      Bring(unpacked.data(), of_row);
      if (packed != nullptr) StoreVector(layout.dtype, unpacked.data(), dim_, packed);
    }
  });
}

bool CatchUp::Continues(const Hyper& hyper, bool nesterov) const {
  if (!active()) return true;
  if (nesterov != flags_.nesterov) return false;
  Hyper same = hyper;
  same.learning_rate = hyper_.learning_rate;
  same.iteration = hyper_.iteration;
  return memcmp(&same, &hyper_, sizeof(same)) == 0;
}

void CatchUp::Restart(const Hyper& hyper, bool nesterov) {
  // Allocations first: they can fail.
  const bool has_alpha = kind_ == OptimizerKind::kAdam || kind_ == OptimizerKind::kAdamax;
  const RowOptimizer optimizer(kind_, flags_, hyper, dim_);
  const uint64_t bound = MostSingleSteps(kind_, flags_, hyper);
  std::vector<double> rates = RatesOf(kind_, flags_, optimizer.coefficients());
  alphas_.resize(has_alpha ? kAlphas : 0);
  ticks_.resize(bound <= kMostDrift ? bound : 0);

  flags_.nesterov = nesterov;
  hyper_ = hyper;
  hyper_.learning_rate = hyper_.iteration = 0.0f;
  optimizer_ = RowOptimizer(kind_, flags_, hyper, dim_);
  rates_ = std::move(rates);
  bound_ = bound;
  num_ticks_ = 0;
  for (CutTick& cut : cuts_) cut.settled = 0;
  ForgetAll();
}

void CatchUp::Reserve() {
  if (runs_.size() == runs_.capacity()) runs_.reserve(2 * runs_.size() + 16);
}

void CatchUp::Record(const Hyper& hyper, uint64_t iteration, Tick tick) {
  Add(hyper.learning_rate, iteration, 1, tick);
  if (ticks_.empty()) return;
  ticks_[step_ % ticks_.size()] = tick;
  ++num_ticks_;
}

void CatchUp::Add(float learning_rate, uint64_t iteration, uint64_t steps, Tick tick) {
  const uint64_t first = step_ + 1;
  const StepRun* last = runs_.empty() ? nullptr : &runs_.back();
  if (last == nullptr || last->learning_rate != learning_rate ||
      last->iteration + (first - last->first) != iteration) {
    runs_.push_back({first, iteration, learning_rate, tick, View().LogDecay(step_)});
  }
  step_ += steps;
  last_tick_ = tick;
  if (alphas_.empty()) return;
  for (uint64_t s = std::max(first, step_ + 1 - std::min<uint64_t>(step_, kAlphas)); s <= step_;
       ++s) {
    alphas_[s % kAlphas] = formulas::Alpha(kind_, CatchUpView::HyperOf(hyper_, runs_.back(), s));
  }
}

void CatchUp::Forget(uint64_t step) {
  first_ = std::max(first_, step);
  size_t dropped = 0;
  while (dropped + 1 < runs_.size() && runs_[dropped + 1].first <= step + 1) ++dropped;
  if (runs_.empty()) return;
  if (runs_[dropped].first <= step) {
    forgotten_ = last_tick_;  // the ticks of the steps in this run are not known
  } else if (dropped != 0) {
    forgotten_ = runs_[dropped].tick - 1;
  }
  dropped_ += dropped;
  runs_.erase(runs_.begin(), runs_.begin() + static_cast<std::ptrdiff_t>(dropped));
}

void CatchUp::ForgetAll() {
  runs_.clear();
  record_ = NextRecord();
  dropped_ = 0;
  alphas_from_ = step_ + 1;
  if (active()) forgotten_ = last_tick_;
  first_ = step_;
}

void CatchUp::NoteCut(Tick watermark) {
  if (!enabled_) return;
  const bool known = !ticks_.empty() && num_ticks_ >= bound_;
  // The oldest tick belongs to step step_ + 1 - J: rows updated before it have had J steps since.
  const Tick settled = known ? ticks_[(step_ + 1) % ticks_.size()] - 1 : 0;
  if (cuts_.size() == kMostCuts) cuts_.erase(cuts_.begin(), cuts_.begin() + kMostCuts / 2);
  cuts_.push_back({watermark, settled, step_});
}

Tick CatchUp::Settled(Tick since) const {
  if (!enabled_ || bound_ == 0) return since;
  const auto after = std::upper_bound(cuts_.begin(), cuts_.end(), since,
                                      [](Tick t, const CutTick& cut) { return t < cut.watermark; });
  return after == cuts_.begin() ? 0 : std::prev(after)->settled;
}

std::vector<double> CatchUp::Save(Tick since) const {
  if (!enabled_) return {};
  uint64_t before = step_;  // no later step is before `since`
  size_t run = runs_.size();
  if (since != 0 && active()) {
    run = 0;
    while (run + 1 < runs_.size() && runs_[run + 1].tick <= since) ++run;
    before = std::max(runs_[run].first - 1, first_);
    const auto after =
        std::upper_bound(cuts_.begin(), cuts_.end(), since,
                         [](Tick tick, const CutTick& cut) { return tick < cut.watermark; });
    if (after != cuts_.begin()) before = std::max(before, std::prev(after)->step);
    while (run < runs_.size() &&
           (run + 1 < runs_.size() ? runs_[run + 1].first - 1 : step_) <= before) {
      ++run;
    }
  }
  return SaveRuns(before, run);
}

std::vector<double> CatchUp::SaveAll() const {
  if (!enabled_) return {};
  return SaveRuns(active() ? std::max(first_, first_of_runs() - 1) : step_, 0);
}

std::vector<double> CatchUp::SaveRuns(uint64_t before, size_t run) const {
  std::vector<double> saved(kHead, 1.0);
  saved[0] = static_cast<double>(step_);
  saved[1] = static_cast<double>(before);
  saved[2] = flags_.nesterov ? 1.0 : 0.0;
  float hyper[kHyperSize];
  memcpy(hyper, &hyper_, sizeof(hyper));
  std::copy(hyper, hyper + kHyperSize, &saved[kHyperAt]);
  std::copy(rates_.begin(), rates_.end(), &saved[kRatesAt]);
  for (; run < runs_.size(); ++run) {
    const uint64_t begin = std::max(runs_[run].first, before + 1);
    const uint64_t end = run + 1 < runs_.size() ? runs_[run + 1].first : step_ + 1;
    if (end <= begin) continue;
    saved.push_back(static_cast<double>(end - begin));
    saved.push_back(runs_[run].learning_rate);
    saved.push_back(static_cast<double>(runs_[run].iteration + (begin - runs_[run].first)));
  }
  return saved;
}

Status CatchUp::Parse(const std::vector<double>& saved, const StateSpec& spec, int64_t dim,
                      Tick tick, CatchUp* parsed) {
  constexpr double kMostExact = 9007199254740992.0;  // 2^53
  const Status bad = InvalidArgument("the record of steps for the state of '" + spec.optimizer +
                                     "' is not one that a table saves");
  CatchUp made(spec, dim);
  if (!made.enabled() || saved.size() < kHead || (saved.size() - kHead) % kRunNumbers != 0 ||
      !IsCount(saved[0], kMostExact) || !IsCount(saved[1], saved[0]) || !IsCount(saved[2], 1)) {
    return bad;
  }
  Hyper hyper;
  float numbers[kHyperSize];
  for (size_t i = 0; i < kHyperSize; ++i) numbers[i] = static_cast<float>(saved[kHyperAt + i]);
  memcpy(&hyper, numbers, sizeof(hyper));
  made.step_ = static_cast<uint64_t>(saved[1]);
  made.last_tick_ = tick;
  made.Restart(hyper, saved[2] != 0);
  for (size_t i = kHead; i < saved.size(); i += kRunNumbers) {
    if (!IsCount(saved[i], saved[0] - static_cast<double>(made.step_)) || saved[i] == 0 ||
        !IsCount(saved[i + 2], kMostExact)) {
      return bad;
    }
    made.Add(static_cast<float>(saved[i + 1]), static_cast<uint64_t>(saved[i + 2]),
             static_cast<uint64_t>(saved[i]), tick);
  }
  if (made.step_ != static_cast<uint64_t>(saved[0])) return bad;
  made.loaded_ = made.step_;
  made.cuts_.push_back({tick, 0, made.step_});
  *parsed = std::move(made);
  return {};
}

bool CatchUp::IsExtendedBy(const CatchUp& later) const {
  return later.first_ <= step_ && step_ < later.step_ &&
         Continues(later.hyper_, later.flags_.nesterov);
}

void CatchUp::Extend(const CatchUp& later) {
  num_ticks_ = 0;
  loaded_ = later.step_;
  if (cuts_.size() == kMostCuts) cuts_.erase(cuts_.begin(), cuts_.begin() + kMostCuts / 2);
  cuts_.insert(cuts_.end(), later.cuts_.begin(), later.cuts_.end());
  if (!active()) {
    const uint64_t step = step_;
    const Tick forgotten = forgotten_;
    std::vector<CutTick> cuts = std::move(cuts_);
    *this = later;
    first_ = step;
    forgotten_ = forgotten;
    cuts_ = std::move(cuts);
    return;
  }
  for (size_t run = 0; run < later.runs_.size(); ++run) {
    const StepRun& r = later.runs_[run];
    const uint64_t end =
        run + 1 < later.runs_.size() ? later.runs_[run + 1].first : later.step_ + 1;
    if (end <= step_ + 1) continue;
    const uint64_t from = std::max(r.first, step_ + 1);
    Add(r.learning_rate, r.iteration + (from - r.first), end - from, later.last_tick_);
  }
}

}  // namespace dynemb
