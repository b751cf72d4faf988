#include "cc/serving/dense_weights.h"

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <optional>
#include <utility>

#include "cc/io/json.h"
#include "cc/serving/verified_file.h"

namespace dynemb {
namespace {

// A file has the size of the header in this many bytes, the header, and the arrays.
constexpr size_t kPrefixBytes = 8;
constexpr size_t kMostHeaderBytes = 100'000'000;  // the limit of the safetensors library
constexpr uint64_t kMostBytes = uint64_t{1} << 48;

size_t ItemBytes(const std::string& dtype) {
  static constexpr struct {
    const char* dtype;
    size_t bytes;
  } kItems[] = {
      {"BOOL", 1}, {"I8", 1},  {"U8", 1},  {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2},
      {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8},
  };
  const auto* const found = std::find_if(std::begin(kItems), std::end(kItems),
                                         [&](const auto& item) { return dtype == item.dtype; });
  return found == std::end(kItems) ? 0 : found->bytes;
}

bool ReadNumbers(const Json& entry, const char* name, std::vector<int64_t>* numbers) {
  const std::optional<Json> found = entry.Find(name);
  if (!found.has_value() || found->kind() != Json::Kind::kArray) return false;
  for (const Json& item : found->items()) {
    uint64_t number = 0;
    if (!item.Get(&number) || number > kMostBytes) return false;
    numbers->push_back(static_cast<int64_t>(number));
  }
  return true;
}

// Reads the entry of an array in the header; sets *begin to its place in the data.
bool ReadEntry(const Json& entry, size_t data_bytes, DenseWeight* weight, size_t* begin) {
  const std::optional<Json> dtype = entry.Find("dtype");
  if (!dtype.has_value()) return false;
  weight->dtype = dtype->string();
  const size_t item_bytes = ItemBytes(weight->dtype);
  std::vector<int64_t> offsets;
  if (item_bytes == 0 || !ReadNumbers(entry, "shape", &weight->shape) ||
      !ReadNumbers(entry, "data_offsets", &offsets) || offsets.size() != 2 ||
      offsets[0] > offsets[1] || static_cast<uint64_t>(offsets[1]) > data_bytes) {
    return false;
  }
  *begin = static_cast<size_t>(offsets[0]);
  weight->bytes = static_cast<size_t>(offsets[1] - offsets[0]);
  uint64_t bytes = item_bytes;
  for (const int64_t n : weight->shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(n), &bytes)) return false;
  }
  return bytes == weight->bytes;
}

std::string Described(const DenseWeight& weight) {
  std::string text = weight.dtype + " [";
  for (size_t i = 0; i < weight.shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(weight.shape[i]);
  }
  return text + "]";
}

}  // namespace

void DenseWeights::Free::operator()(char* data) const { free(data); }

Status DenseWeights::Read(Exec& exec, const Manifest& manifest,
                          std::shared_ptr<const DenseWeights>* weights) {
  const std::string path = manifest.directory + "/" + manifest.dense->file;
  const auto damaged = [&path](const std::string& what) {
    return DataLoss(path + " is damaged: " + what);
  };
  std::unique_ptr<VerifiedFile> file;
  DYNEMB_RETURN_IF_ERROR(VerifiedFile::Open(manifest, *manifest.dense, &file));
  DYNEMB_RETURN_IF_ERROR(file->VerifyAll(exec));
  uint64_t header_bytes = 0;
  if (file->bytes() < kPrefixBytes) return damaged("it has no header");
  memcpy(&header_bytes, file->data(), kPrefixBytes);
  if (header_bytes > std::min(kMostHeaderBytes, file->bytes() - kPrefixBytes)) {
    return damaged("its header has " + std::to_string(header_bytes) + " bytes");
  }
  Json header;
  const Status parsed =
      Json::Parse(std::string(file->data() + kPrefixBytes, header_bytes), &header);
  if (!parsed.ok()) return damaged("its header: " + parsed.message());
  if (header.kind() != Json::Kind::kObject) return damaged("its header is no object");
  const char* const data = file->data() + kPrefixBytes + header_bytes;
  const size_t data_bytes = file->bytes() - kPrefixBytes - header_bytes;

  std::shared_ptr<DenseWeights> made(new DenseWeights);
  std::vector<std::pair<DenseWeight*, size_t>> places;  // where the data of each begins
  size_t bytes = 0, aligned_bytes = 0;
  for (const auto& [name, entry] : header.members()) {
    if (name == "__metadata__") continue;  // texts
    DenseWeight& weight = made->weights_[name];
    size_t begin = 0;
    if (!ReadEntry(entry, data_bytes, &weight, &begin)) {
      return damaged("its header is wrong about '" + name + "'");
    }
    places.emplace_back(&weight, begin);
    bytes += weight.bytes;
    if (bytes > data_bytes) break;
    aligned_bytes += (weight.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (bytes != data_bytes) return damaged("its arrays do not have the size of its data");
  // An empty array has an address, too.
  made->data_.reset(
      static_cast<char*>(aligned_alloc(kAlignment, std::max(aligned_bytes, kAlignment))));
  if (made->data_ == nullptr) throw std::bad_alloc();
  char* to = made->data_.get();
  for (const auto& [weight, begin] : places) {
    weight->data = to;
    memcpy(to, data + begin, weight->bytes);
    to += (weight->bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  *weights = std::move(made);
  return Status();
}

const DenseWeight* DenseWeights::Find(const std::string& name) const {
  const auto found = weights_.find(name);
  return found == weights_.end() ? nullptr : &found->second;
}

std::string DenseWeights::DifferenceFrom(const DenseWeights& o) const {
  for (const auto& [name, weight] : weights_) {
    const DenseWeight* const other = o.Find(name);
    if (other == nullptr) return "it has '" + name + "', and the other has not";
    const std::string here = Described(weight), there = Described(*other);
    if (here != there) return "'" + name + "' is " + here + ", and in the other " + there;
  }
  for (const auto& [name, weight] : o.weights_) {
    if (Find(name) == nullptr) return "it lacks '" + name + "'";
  }
  return std::string();
}

}  // namespace dynemb
