// The contract suite of served tables on a device: every call has the bits of the table on the
// host, whose model is served_table_test. Typed by a Place:
//
//   static std::string Missing()     the reason why there is no such device; empty if there is one
//   static ServedPlace* place()
//   class Arrays                     arrays in the device's memory, as HostArrays
//   static Exec& exec()              the stream of calls
#ifndef DYNEMB_TESTS_CC_SERVED_SUITE_H_
#define DYNEMB_TESTS_CC_SERVED_SUITE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/lookups.h"
#include "cc/serving/served_lookups.h"
#include "cc/serving/served_place.h"
#include "cc/serving/served_table.h"
#include "tests/cc/host_arrays.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/served_rows.h"

namespace dynemb {
namespace testing_served_rows {

constexpr uint64_t kAll = ~uint64_t{0};

// The options of a table in a place.
inline ServedOptions Placed(ServedOptions options, ServedPlace* place,
                            uint64_t max_device_bytes = kAll) {
  options.place = place;
  options.max_device_bytes = max_device_bytes;
  return options;
}

// Asked keys, some without a row and some twice, as an array of the table's key type.
struct Asked {
  Asked(KeyType key_type, size_t n, std::mt19937_64* random) : type(key_type) {
    for (size_t i = 0; i < n; ++i) {
      wide.push_back(KeyAt(type, (*random)() % (kKeys + 20)));
      narrow.push_back(static_cast<uint32_t>(wide.back()));
    }
  }
  size_t size() const { return wide.size(); }
  template <class Arrays>
  const void* Up(Arrays* arrays) const {
    return type == KeyType::kInt32 ? static_cast<const void*>(arrays->Up(narrow))
                                   : arrays->Up(wide);
  }
  KeyType type;
  std::vector<uint64_t> wide;
  std::vector<uint32_t> narrow;
};

template <class T>
void ExpectSameBits(const std::vector<T>& a, const std::vector<T>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0) << what;
}

// What the calls of one table return. `given`: a default vector for Lookup, or empty.
struct Answers {
  template <class Arrays>
  static Answers Of(Table& table, Exec& exec, const Asked& asked,
                    const std::vector<char>& given = {}) {
    Arrays arrays;
    const size_t n = asked.size(), dim = static_cast<size_t>(table.options().dim);
    const size_t bytes = n * table.layout().vector_bytes();
    const KeySpan keys(asked.type, asked.Up(&arrays), n);
    char* const vectors = arrays.Up(std::vector<char>(bytes, 0x55));
    float* const floats = arrays.Up(std::vector<float>(n * dim, 0.5f));
    RowId* const rows = arrays.Up(std::vector<RowId>(n, 7));
    RowId* const found_rows = arrays.Up(std::vector<RowId>(n, 7));
    char* const contains = arrays.Up(std::vector<char>(n, 0));
    char* const found = arrays.Up(std::vector<char>(n, 0));
    table.Lookup(exec, keys, 1, arrays.Up(given), vectors, rows);
    table.Find(exec, keys, 1, found_rows);
    table.Contains(exec, keys, reinterpret_cast<bool*>(contains));
    table.ReadRows(exec, keys, floats, nullptr, reinterpret_cast<bool*>(found));
    const Status status = table.Error();
    EXPECT_TRUE(status.ok()) << status.message();
    return {arrays.Down(vectors, bytes), arrays.Down(rows, n),  arrays.Down(found_rows, n),
            arrays.Down(contains, n),    arrays.Down(found, n), arrays.Down(floats, n * dim)};
  }
  void ExpectEqual(const Answers& other) const {
    ExpectSameBits(vectors, other.vectors, "vectors");
    ExpectSameBits(floats, other.floats, "floats");
    EXPECT_EQ(rows, other.rows);
    EXPECT_EQ(found_rows, other.found_rows);
    EXPECT_EQ(contains, other.contains);
    EXPECT_EQ(found, other.found);
  }
  std::vector<char> vectors;
  std::vector<RowId> rows, found_rows;
  std::vector<char> contains, found;
  std::vector<float> floats;
};

template <class Place>
void ExpectSameAnswers(ServedTable& table, std::mt19937_64* random) {
  const Asked asked(table.options().key_type, 300, random);
  SerialExec serial;
  for (const auto& given :
       {std::vector<char>(), std::vector<char>(table.layout().vector_bytes(), 0x21)}) {
    Answers::Of<typename Place::Arrays>(*table.placed(), Place::exec(), asked, given)
        .ExpectEqual(Answers::Of<HostArrays>(table, serial, asked, given));
  }
  ASSERT_EQ(table.placed()->size(), table.size());
}

// The ids of a task, in bags.
struct Feature {
  Feature(const ServedTable& of, std::mt19937_64* random)
      : asked(of.options().key_type, 40 + (*random)() % 60, random) {
    const auto n = static_cast<int64_t>(asked.size());
    const int64_t num_bags = 1 + static_cast<int64_t>((*random)() % 30);
    SerialExec exec;
    Status status;
    switch ((*random)() % 3) {
      case 0:
        status = bags.InitUniform(1, n, n);
        break;
      case 1:
        for (int64_t b = 0; b <= num_bags; ++b) splits.push_back(b == num_bags ? n : n * b / 40);
        status = bags.InitSplits(exec, splits.data(), num_bags + 1, n, num_bags);
        break;
      default:
        for (int64_t i = 0; i < n; ++i) {
          indices.push_back(static_cast<int64_t>((*random)() % static_cast<uint64_t>(num_bags)));
        }
        status = bags.InitIndices(exec, indices.data(), 1, n, num_bags);
    }
    EXPECT_TRUE(status.ok()) << status.message();
    for (int64_t i = 0; i < n; ++i) weights.push_back(static_cast<float>((*random)() % 7) - 2.0f);
    weighted = (*random)() % 2 == 0;
    combiner = static_cast<Combiner>((*random)() % 4);
  }

  Asked asked;
  std::vector<int64_t> splits, indices;
  Bags bags;
  std::vector<float> weights;
  bool weighted;
  Combiner combiner;
};

struct Output {
  std::vector<char> pooled;
  std::vector<int32_t> argmax;
  std::vector<RowId> rows;
  std::vector<float> gradient;
};

// Pools features, and differentiates their weights.
template <class Arrays>
std::vector<Output> PoolAll(Lookups& lookups, Exec& exec, const std::vector<Feature>& features,
                            const std::vector<Table*>& tables) {
  Arrays arrays;
  std::vector<PoolTask> pools(features.size());
  std::vector<WeightGradientTask> gradients(features.size());
  std::vector<size_t> bytes(features.size()), maxima(features.size());
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const size_t num_bags = feature.bags.num_bags();
    bytes[f] = num_bags * tables[f]->layout().vector_bytes();
    maxima[f] = feature.combiner == Combiner::kMax
                    ? num_bags * static_cast<size_t>(tables[f]->options().dim)
                    : 0;
    const float* const weights = arrays.Up(feature.weights);
    PoolTask& pool = pools[f];
    pool.bags = &feature.bags;
    pool.weights = feature.weighted ? weights : nullptr;
    pool.combiner = feature.combiner;
    pool.pooled = arrays.Up(std::vector<char>(bytes[f], 0x55));
    pool.argmax = arrays.Up(std::vector<int32_t>(maxima[f], 7));
    pool.table = tables[f];
    pool.keys = feature.asked.Up(&arrays);
    pool.rows = arrays.Up(std::vector<RowId>(feature.bags.nnz(), 7));
    WeightGradientTask& gradient = gradients[f];
    gradient.bags = pool.bags;
    gradient.weights = weights;
    gradient.combiner = pool.combiner;
    gradient.argmax = pool.argmax;
    gradient.pooled = pool.pooled;
    // Numbers around 1 in any of the dtypes.
    gradient.upstream = arrays.Up(std::vector<char>(bytes[f], 0x3C));
    gradient.gradient = arrays.Up(std::vector<float>(feature.bags.nnz(), 7.0f));
    gradient.table = pool.table;
    gradient.keys = pool.keys;
    gradient.rows = pool.rows;
  }
  Status status = lookups.Pool(exec, pools, 1, true);
  EXPECT_TRUE(status.ok()) << status.message();
  status = lookups.WeightGradient(exec, gradients);
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<Output> outputs;
  for (size_t f = 0; f < features.size(); ++f) {
    const size_t n = features[f].bags.nnz();
    outputs.push_back({arrays.Down(static_cast<const char*>(pools[f].pooled), bytes[f]),
                       arrays.Down(pools[f].argmax, maxima[f]), arrays.Down(pools[f].rows, n),
                       arrays.Down(gradients[f].gradient, n)});
  }
  return outputs;
}

// Two or three features of each table, in one call.
template <class Place>
void ExpectSamePools(const std::vector<ServedTable*>& served, std::mt19937_64* random) {
  std::vector<Feature> features;
  std::vector<Table*> host, device;
  for (size_t f = 0; f < 2 * served.size() + 1; ++f) {
    ServedTable* const table = served[f % served.size()];
    features.emplace_back(*table, random);
    host.push_back(table);
    device.push_back(table->placed().get());
  }
  SerialExec serial;
  const auto expected = PoolAll<HostArrays>(ServedLookups(), serial, features, host);
  const auto outputs =
      PoolAll<typename Place::Arrays>(Place::place()->lookups(), Place::exec(), features, device);
  for (size_t f = 0; f < features.size(); ++f) {
    SCOPED_TRACE(testing::Message()
                 << "feature " << f << ", combiner " << static_cast<int>(features[f].combiner)
                 << ", weighted " << features[f].weighted);
    ExpectSameBits(outputs[f].pooled, expected[f].pooled, "pooled");
    ExpectSameBits(outputs[f].gradient, expected[f].gradient, "gradient");
    EXPECT_EQ(outputs[f].argmax, expected[f].argmax);
    EXPECT_EQ(outputs[f].rows, expected[f].rows);
  }
}

template <class Place>
class DeviceServedSuite : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }
};
TYPED_TEST_SUITE_P(DeviceServedSuite);

TYPED_TEST_P(DeviceServedSuite, RandomDeltasHaveTheBitsOfTheHost) {
  std::mt19937_64 random(1);
  for (const KeyType key_type : {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      const TestTable shape = Shape(
          key_type, dtype, dtype == DType::kFloat32 ? 8 : 1 + static_cast<int64_t>(random() % 9));
      const uint64_t budget = random() % 3 == 0 ? kAll : random() % 2000;
      ServedOptions options = Placed(OptionsOf(shape), TypeParam::place(), budget);
      World world(shape, /*verify=*/random() % 2 == 0, {}, &options);
      const size_t rows = key_type == KeyType::kUint64 ? 0 : 150;
      ASSERT_TRUE(world.Apply(RandomRows(key_type, rows, &random), {}, 1 + random() % 4).ok());
      for (int step = 0; step < (kSanitized ? 3 : 10); ++step) {
        ExpectSameAnswers<TypeParam>(*world.table_, &random);
        ExpectSamePools<TypeParam>({world.table_.get()}, &random);
        if (this->HasFailure()) return;
        const auto changed = RandomRows(key_type, random() % (step % 5 == 0 ? 100 : 5), &random);
        std::vector<uint64_t> deleted;
        for (const auto& [key, number] : RandomRows(key_type, random() % 20, &random)) {
          if (changed.count(key) == 0) deleted.push_back(key);
        }
        const Status status = world.Apply(changed, deleted, 1 + random() % 3);
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

TYPED_TEST_P(DeviceServedSuite, VectorFormats) {
  std::mt19937_64 random(11);
  for (const auto& formats : std::vector<std::vector<std::string>>{
           {"int8"}, {"int4"}, {"", "int4", "int8"}, {"int4", "int8", "int8", ""}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      TestTable shape = Shape(KeyType::kInt64, dtype, 1 + static_cast<int64_t>(random() % 15));
      shape.scale = 0x2E67;  // 0.1: products that 16-bit types round
      ServedOptions options = Placed(OptionsOf(shape), TypeParam::place(), 500 + random() % 2000);
      World world(shape, true, formats, &options);
      ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 150, &random, 100), {}, 2).ok());
      for (int step = 0; step < (kSanitized ? 3 : 6); ++step) {
        ExpectSameAnswers<TypeParam>(*world.table_, &random);
        ExpectSamePools<TypeParam>({world.table_.get()}, &random);
        if (this->HasFailure()) return;
        ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 20, &random, 100), {}).ok());
      }
    }
  }
}

// Each way to read a key without a row, and tables of several widths and dtypes in one call.
TYPED_TEST_P(DeviceServedSuite, KeysWithoutARow) {
  std::mt19937_64 random(5);
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<ServedTable*> tables;
  const auto add = [&](const TestTable& shape, ServedOptions options) {
    options = Placed(std::move(options), TypeParam::place());
    worlds.push_back(std::make_unique<World>(shape, true, std::vector<std::string>(), &options));
    ASSERT_TRUE(worlds.back()->Apply(RandomRows(KeyType::kInt64, 100, &random), {}).ok());
    tables.push_back(worlds.back()->table_.get());
  };
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
    for (const int64_t dim : {3, 4, 40}) {
      const TestTable shape = Shape(KeyType::kInt64, dtype, dim);
      ServedOptions options = OptionsOf(shape);
      add(shape, options);
      options.absent = Unadmitted::kZeros;
      add(shape, options);
      options.absent = Unadmitted::kSkip;
      add(shape, options);
      options.default_vector.assign(static_cast<size_t>(dim), 0.3f);
      add(shape, options);
    }
  }
  for (ServedTable* table : tables) ExpectSameAnswers<TypeParam>(*table, &random);
  ExpectSamePools<TypeParam>(tables, &random);
}

REGISTER_TYPED_TEST_SUITE_P(DeviceServedSuite, RandomDeltasHaveTheBitsOfTheHost, VectorFormats,
                            KeysWithoutARow);

}  // namespace testing_served_rows
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SERVED_SUITE_H_
