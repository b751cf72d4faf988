#include "cc/serving/dense_weights.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
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

size_t Aligned(size_t bytes) {
  return (bytes + DenseWeights::kAlignment - 1) / DenseWeights::kAlignment *
         DenseWeights::kAlignment;
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
  const auto damaged = [&manifest](const std::string& what) {
    return DataLoss(manifest.directory + "/" + manifest.dense->file + " is damaged: " + what);
  };
  std::shared_ptr<DenseWeights> made(new DenseWeights);
  DYNEMB_RETURN_IF_ERROR(VerifiedFile::Open(manifest, *manifest.dense, &made->file_));
  DYNEMB_RETURN_IF_ERROR(made->file_->VerifyAll(exec));
  const char* const file = made->file_->data();
  const size_t file_bytes = made->file_->bytes();
  uint64_t header_bytes = 0;
  if (file_bytes < kPrefixBytes) return damaged("it has no header");
  memcpy(&header_bytes, file, kPrefixBytes);
  if (header_bytes > std::min(kMostHeaderBytes, file_bytes - kPrefixBytes)) {
    return damaged("its header has " + std::to_string(header_bytes) + " bytes");
  }
  Json header;
  const Status parsed = Json::Parse(std::string(file + kPrefixBytes, header_bytes), &header);
  if (!parsed.ok()) return damaged("its header: " + parsed.message());
  if (header.kind() != Json::Kind::kObject) return damaged("its header is not an object");
  const char* const data = file + kPrefixBytes + header_bytes;
  const size_t data_bytes = file_bytes - kPrefixBytes - header_bytes;

  std::vector<DenseWeight*> unaligned;
  size_t bytes = 0, unaligned_bytes = 0;
  for (const auto& [name, entry] : header.members()) {
    if (name == "__metadata__") continue;  // texts
    DenseWeight& weight = made->weights_[name];
    size_t begin = 0;
    if (!ReadEntry(entry, data_bytes, &weight, &begin)) {
      return damaged("its header is wrong about '" + name + "'");
    }
    weight.data = data + begin;
    bytes += weight.bytes;
    if (bytes > data_bytes) break;
    if (reinterpret_cast<uintptr_t>(weight.data) % kAlignment != 0) {
      unaligned.push_back(&weight);
      unaligned_bytes += Aligned(weight.bytes);
    }
  }
  if (bytes != data_bytes) return damaged("its arrays do not have the size of its data");
  // An array without elements has an address, too.
  made->unaligned_.reset(
      static_cast<char*>(aligned_alloc(kAlignment, std::max(unaligned_bytes, kAlignment))));
  if (made->unaligned_ == nullptr) throw std::bad_alloc();
  char* to = made->unaligned_.get();
  for (DenseWeight* const weight : unaligned) {
    memcpy(to, weight->data, weight->bytes);
    weight->data = to;
    to += Aligned(weight->bytes);
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
    if (other == nullptr) return "'" + name + "' is new";
    const std::string here = Described(weight), there = Described(*other);
    if (here != there) return "'" + name + "' is " + here + " instead of " + there;
  }
  for (const auto& [name, weight] : o.weights_) {
    if (Find(name) == nullptr) return "'" + name + "' is missing";
  }
  return std::string();
}

}  // namespace dynemb
