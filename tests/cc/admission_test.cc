// AdmissionCounters against a model in plain C++: each line is a list of (fingerprint, count), the
// last counted first.
#include "cc/table/admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/owners.h"
#include "cc/table/exec.h"

namespace dynemb {
namespace {

using Place = AdmissionCounters::Place;

class Model {
 public:
  explicit Model(size_t lines) : lines_(lines) {}

  uint32_t Count(const Place& at, uint32_t times) {
    std::list<Entry>& line = lines_[at.line];
    const auto found = Find(at);
    uint64_t count = times;
    if (found != line.end()) {
      count += found->count;
      line.erase(found);
    }
    line.push_front({at.fingerprint, static_cast<uint32_t>(std::min<uint64_t>(count, 255))});
    if (line.size() > 23) line.pop_back();
    return line.front().count;
  }
  uint32_t CountOf(const Place& at) {
    const auto found = Find(at);
    return found == lines_[at.line].end() ? 0 : found->count;
  }
  void Forget(const Place& at) {
    const auto found = Find(at);
    if (found != lines_[at.line].end()) lines_[at.line].erase(found);
  }

 private:
  struct Entry {
    uint32_t fingerprint, count;
  };
  std::list<Entry>::iterator Find(const Place& at) {
    return std::find_if(lines_[at.line].begin(), lines_[at.line].end(),
                        [&](const Entry& e) { return e.fingerprint == at.fingerprint; });
  }
  std::vector<std::list<Entry>> lines_;
};

AdmissionCounters Counters(int64_t lines, int64_t first = 0, int64_t num = -1) {
  AdmissionCounters counters;
  EXPECT_TRUE(counters.Init(lines, first, num < 0 ? lines : num).ok());
  return counters;
}

TEST(AdmissionCounters, AgreesWithAModel) {
  constexpr int64_t kLines = 5;
  AdmissionCounters counters = Counters(kLines);
  Model model(kLines);
  std::mt19937_64 random(7);
  for (int step = 0; step < 200000; ++step) {
    // Few keys are common, so that counts grow while others are pushed out.
    const uint64_t key = random() % 4 == 0 ? random() % 1000 : random() % 60;
    const Place at = counters.Of(key);
    ASSERT_LT(at.line, kLines);
    ASSERT_LT(at.fingerprint, 1u << 14);
    if (random() % 10 == 0) {
      counters.Forget(at);
      model.Forget(at);
    } else {
      const uint32_t times = random() % 50 == 0 ? 0xFFFFFFFF - random() % 300 : random() % 5 + 1;
      ASSERT_EQ(counters.Count(at, times), model.Count(at, times)) << "step " << step;
    }
    const Place other = counters.Of(random() % 1000);
    ASSERT_EQ(counters.CountOf(other), model.CountOf(other)) << "step " << step;
  }
}

TEST(AdmissionCounters, RemembersTheLast23KeysOfALine) {
  AdmissionCounters counters = Counters(1);
  for (uint32_t f = 0; f < 24; ++f) EXPECT_EQ(counters.Count({0, f}, 1), 1u);
  EXPECT_EQ(counters.CountOf({0, 0}), 0u);
  EXPECT_EQ(counters.CountOf({0, 1}), 1u);
  // Counting a key makes it the last to be pushed out.
  EXPECT_EQ(counters.Count({0, 1}, 1), 2u);
  EXPECT_EQ(counters.Count({0, 99}, 1), 1u);
  EXPECT_EQ(counters.CountOf({0, 1}), 2u);
  EXPECT_EQ(counters.CountOf({0, 2}), 0u);
}

// At each place of the line, beside fingerprints that differ in one bit, and counts of all bits.
TEST(AdmissionCounters, FindsAFingerprintAmongSimilarOnes) {
  for (uint32_t f : {0u, 1u, 0x1555u, 0x2AAAu, 0x3FFFu}) {
    AdmissionCounters counters = Counters(1);
    EXPECT_EQ(counters.CountOf({0, f}), 0u);
    for (uint32_t bit = 0; bit < 14; ++bit) {
      counters.Count({0, f ^ 1u << bit}, 255);
      EXPECT_EQ(counters.CountOf({0, f}), 0u);
    }
    counters.Count({0, f}, 100 + f % 100);
    for (uint32_t place = 0; place < 23; ++place) {
      ASSERT_EQ(counters.CountOf({0, f}), 100 + f % 100) << "place " << place;
      counters.Count({0, f ^ (place + 1)}, place % 2 == 0 ? 255 : 1);
    }
    EXPECT_EQ(counters.CountOf({0, f}), 0u);
  }
}

TEST(AdmissionCounters, HasADocumentedFormat) {
  AdmissionCounters counters = Counters(1);
  counters.Count({0, 0x2AAA}, 3);
  counters.Count({0, 0x1234}, 300);
  const uint64_t first = uint64_t{0x1234} << 8 | 255, second = uint64_t{0x2AAA} << 8 | 3;
  EXPECT_EQ(counters.data()[0], first | second << 22);
  for (int word = 1; word < 8; ++word) EXPECT_EQ(counters.data()[word], 0u);
  // The fourth entry crosses a word: the third entry has bits 44 to 65.
  counters.Count({0, 1}, 1);
  EXPECT_EQ(counters.data()[0], (uint64_t{1} << 8 | 1) | first << 22 | second << 44);
  EXPECT_EQ(counters.data()[1], second >> 20);
}

TEST(AdmissionCounters, LinesFollowOwners) {
  constexpr int64_t kLines = 1000;
  const AdmissionCounters all = Counters(kLines);
  for (uint32_t ranks : {2u, 3u, 7u}) {
    const Owners owners{Owners::Rule::kHash, ranks, 0};
    std::mt19937_64 random(ranks);
    for (int i = 0; i < 20000; ++i) {
      const uint64_t key = random();
      const uint64_t rank = owners.Of(key);
      const uint32_t line = all.Of(key).line;
      // The lines that intersect the rank's part of all hashes.
      EXPECT_GE(line, kLines * rank / ranks);
      EXPECT_LE(line, kLines * (rank + 1) / ranks);
      // On its rank, a key has the same line and fingerprint.
      const int64_t first = static_cast<int64_t>(kLines * rank / ranks);
      const AdmissionCounters part = Counters(kLines, first, kLines / ranks + 2);
      if (i > 200) continue;
      EXPECT_EQ(part.Of(key).line, line - first);
      EXPECT_EQ(part.Of(key).fingerprint, all.Of(key).fingerprint);
    }
  }
}

TEST(AdmissionCounters, KeysOfOtherRanksHavePlaces) {
  AdmissionCounters part = Counters(1000, 400, 10);
  for (uint64_t key = 0; key < 10000; ++key) {
    ASSERT_LT(part.Of(key).line, 10u);
    part.Count(part.Of(key), 1);
  }
}

TEST(AdmissionCounters, LoadsTheLinesThatItHas) {
  constexpr int64_t kLines = 90;
  AdmissionCounters all = Counters(kLines);
  std::set<uint64_t> keys;
  for (uint64_t key = 0; key < 500; ++key) {
    keys.insert(key);
    all.Count(all.Of(key), static_cast<uint32_t>(key % 200 + 1));
  }
  // Saved by three objects, loaded by two, which overlap.
  for (const auto& [first, num] : {std::pair<int64_t, int64_t>{0, 46}, {45, 45}}) {
    AdmissionCounters part = Counters(kLines, first, num);
    for (int64_t begin = 0; begin < kLines; begin += 30) {
      ASSERT_TRUE(part.Load(all.data() + begin * 8, begin, 30, false).ok());
    }
    for (uint64_t key : keys) {
      const Place at = all.Of(key);
      if (at.line < first || at.line >= first + num) continue;
      EXPECT_EQ(part.CountOf(part.Of(key)), all.CountOf(at));
    }
  }
}

TEST(AdmissionCounters, LoadRefusesDamagedLines) {
  AdmissionCounters counters = Counters(2);
  counters.Count({1, 5}, 7);
  AdmissionCounters saved = Counters(2);
  for (uint32_t f = 0; f < 23; ++f) saved.Count({0, f}, f + 1);
  const std::vector<uint64_t> good(saved.data(), saved.data() + 16);
  const auto refuses = [&](size_t word, uint64_t bits) {
    std::vector<uint64_t> bad = good;
    bad[word] ^= bits;
    const Status status = counters.Load(bad.data(), 0, 2, false);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("line " + std::to_string(word / 8)), std::string::npos);
    EXPECT_EQ(counters.CountOf({1, 5}), 7u);
    EXPECT_EQ(counters.CountOf({0, 3}), 0u);
  };
  refuses(7, uint64_t{1} << 58);       // a bit after the entries
  refuses(0, 23);                      // a count of 0
  refuses(8, uint64_t{1} << 8);        // a fingerprint without a count
  refuses(9, 1);                       // an entry after an empty one
  refuses(0, uint64_t{22 ^ 21} << 8);  // the fingerprint of the next entry
  EXPECT_TRUE(counters.Load(good.data(), 0, 2, false).ok());
  EXPECT_EQ(counters.CountOf({1, 5}), 0u);
  EXPECT_EQ(counters.CountOf({0, 3}), 4u);
}

TEST(AdmissionCounters, MergesLinesInTurn) {
  AdmissionCounters a = Counters(3), b = Counters(3);
  for (uint32_t f = 0; f < 4; ++f) a.Count({1, f}, f + 1);
  for (uint32_t f = 0; f < 23; ++f) b.Count({1, 3 + f}, 100 + f);
  b.Count({0, 7}, 9);
  ASSERT_TRUE(a.Load(b.data() + 8, 1, 1, true).ok());
  EXPECT_EQ(a.CountOf({0, 7}), 0u);
  // Both have fingerprint 3, which a has counted last.
  for (uint32_t f = 0; f < 4; ++f) EXPECT_EQ(a.CountOf({1, f}), f + 1);
  // The line keeps the 19 other entries that b has counted last.
  for (uint32_t f = 1; f < 23; ++f) EXPECT_EQ(a.CountOf({1, 3 + f}), f < 4 ? 0 : 100 + f);
  // The entries alternate, so the entries of b that came first are pushed out first.
  for (uint32_t n = 0; n < 15; ++n) a.Count({1, 1000 + n}, 1);
  for (uint32_t f = 0; f < 4; ++f) EXPECT_EQ(a.CountOf({1, f}), f + 1);
  EXPECT_EQ(a.CountOf({1, 3 + 22}), 122u);
  EXPECT_EQ(a.CountOf({1, 3 + 18}), 0u);
  // Of two entries at the same place of their lines, that of a comes first.
  a.Count({2, 9}, 5);
  b.Count({2, 9}, 6);
  ASSERT_TRUE(a.Load(b.data() + 16, 2, 1, true).ok());
  EXPECT_EQ(a.CountOf({2, 9}), 5u);
}

Admission Frequency(int64_t times, int64_t lines) {
  AdmissionOptions options;
  options.rule = Admit::kFrequency;
  options.times = times;
  options.lines = options.num_lines = lines;
  Admission admission;
  EXPECT_TRUE(Admission::Check(options).ok());
  EXPECT_TRUE(admission.Init(options, 3).ok());
  return admission;
}

std::vector<bool> Decide(Admission* admission, Exec& exec, const std::vector<uint64_t>& keys,
                         const std::vector<uint32_t>& times, Tick tick) {
  std::vector<AdmissionCounters::Place> places(keys.size());
  std::unique_ptr<bool[]> admitted(new bool[keys.size()]);
  admission->BeginLookup(tick);
  const size_t count = admission->Decide(exec, keys.data(), times.data(), keys.size(),
                                         places.data(), admitted.get());
  EXPECT_EQ(count,
            static_cast<size_t>(std::count(admitted.get(), admitted.get() + keys.size(), true)));
  return std::vector<bool>(admitted.get(), admitted.get() + keys.size());
}

TEST(Admission, AdmitsAKeyThatReachesTheCount) {
  SerialExec exec;
  Admission admission = Frequency(3, 10);
  EXPECT_EQ(Decide(&admission, exec, {1, 2, 3}, {1, 2, 3}, 1),
            (std::vector<bool>{false, false, true}));
  EXPECT_EQ(Decide(&admission, exec, {1, 2, 3}, {1, 1, 2}, 2),
            (std::vector<bool>{false, true, false}));  // 3 was forgotten when it was admitted
  EXPECT_EQ(Decide(&admission, exec, {1, 2, 3}, {1, 2, 1}, 3),
            (std::vector<bool>{true, false, true}));
}

// The threads of an executor own lines, so the results are the same as with one thread.
template <class Make>
void SameForAllThreads(const Make& make) {
  std::mt19937_64 random(11);
  std::vector<std::vector<uint64_t>> batches(20);
  std::vector<std::vector<uint32_t>> times(20);
  for (size_t b = 0; b < batches.size(); ++b) {
    std::set<uint64_t> keys;
    while (keys.size() < 5000) keys.insert(random() % 20000);
    batches[b].assign(keys.begin(), keys.end());
    std::shuffle(batches[b].begin(), batches[b].end(), random);
    for (size_t j = 0; j < keys.size(); ++j) times[b].push_back(random() % 3 + 1);
  }
  SerialExec serial;
  ThreadsExec threads(3);
  Admission one = make(), several = make();
  size_t admitted = 0;
  for (size_t b = 0; b < batches.size(); ++b) {
    const std::vector<bool> expected = Decide(&one, serial, batches[b], times[b], b + 1);
    ASSERT_EQ(Decide(&several, threads, batches[b], times[b], b + 1), expected);
    admitted += static_cast<size_t>(std::count(expected.begin(), expected.end(), true));
  }
  EXPECT_GT(admitted, 1000u);
  EXPECT_LT(admitted, 99000u);
}

TEST(Admission, CountsTheSameWithAnyNumberOfThreads) {
  SameForAllThreads([] { return Frequency(5, 300); });
}

Admission Chance(double probability, uint64_t seed = 3) {
  AdmissionOptions options;
  options.rule = Admit::kProbability;
  options.probability = probability;
  Admission admission;
  EXPECT_TRUE(admission.Init(options, seed).ok());
  return admission;
}

TEST(Admission, DrawsTheSameWithAnyNumberOfThreads) {
  SameForAllThreads([] { return Chance(0.3); });
}

TEST(Admission, AdmitsWithTheProbabilityOfItsOccurrences) {
  SerialExec exec;
  constexpr size_t kKeys = 40000;
  std::vector<uint64_t> keys(kKeys);
  for (size_t j = 0; j < kKeys; ++j) keys[j] = j;
  for (const uint32_t occurrences : {1u, 2u, 5u}) {
    Admission admission = Chance(0.2);
    const std::vector<uint32_t> times(kKeys, occurrences);
    const std::vector<bool> first = Decide(&admission, exec, keys, times, 1);
    const auto count = static_cast<double>(std::count(first.begin(), first.end(), true));
    const double expected = kKeys * (1 - std::pow(0.8, occurrences));
    EXPECT_NEAR(count, expected, 500);  // five standard deviations
    // The draws of another lookup, and of another seed, are independent.
    for (const bool again : {true, false}) {
      Admission other = again ? Chance(0.2) : Chance(0.2, 4);
      if (again) Decide(&other, exec, {0}, {1}, 1);
      const std::vector<bool> second = Decide(&other, exec, keys, times, 2);
      size_t both = 0;
      for (size_t j = 0; j < kKeys; ++j) both += first[j] && second[j];
      EXPECT_NEAR(static_cast<double>(both), expected * expected / kKeys, 500);
    }
  }
}

TEST(Admission, ExtremeProbabilities) {
  SerialExec exec;
  Admission none = Chance(0), all = Chance(1);
  for (uint64_t key = 0; key < 1000; ++key) {
    EXPECT_EQ(Decide(&none, exec, {key}, {0xFFFFFFFF}, key + 1), std::vector<bool>{false});
    EXPECT_EQ(Decide(&all, exec, {key}, {1}, key + 1), std::vector<bool>{true});
  }
}

TEST(Admission, ChecksNameTheOption) {
  const auto message = [](const auto& change) {
    AdmissionOptions options;
    options.rule = Admit::kFrequency;
    options.times = 3;
    options.lines = options.num_lines = 10;
    EXPECT_TRUE(Admission::Check(options).ok());
    change(&options);
    return Admission::Check(options).message();
  };
  using Options = AdmissionOptions*;
  EXPECT_EQ(message([](Options o) { o->times = 0; }), "admission_times=0: must be in [1, 255]");
  EXPECT_EQ(message([](Options o) { o->times = 256; }), "admission_times=256: must be in [1, 255]");
  EXPECT_EQ(message([](Options o) { o->lines = 0; }), "admission_lines=0: must be in [1, 2^32)");
  EXPECT_EQ(message([](Options o) { o->first_line = 1; }),
            "admission_first_line=1, admission_num_lines=10: must be lines of 10");
  EXPECT_EQ(message([](Options o) {
              o->rule = Admit::kProbability;
              o->probability = 1.5;
            }),
            "admission_probability=1.5: must be in [0, 1]");
}

}  // namespace
}  // namespace dynemb
