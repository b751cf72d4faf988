#include "cc/io/manifest.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "cc/io/json.h"
#include "cc/io/json_file.h"

namespace dynemb {
namespace {

constexpr size_t kMostManifestBytes = size_t{1} << 28;
constexpr uint64_t kMostNumber = uint64_t{1} << 62;
constexpr std::string_view kVectorFormats[] = {"float32", "float16", "bfloat16", "int8", "int4"};

bool IsId(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Reads members of one object; the first fault stays in `status`.
class Members {
 public:
  Members(const std::string& file, const Json& object, Status* status)
      : file_(file), object_(object), status_(status) {}

  uint64_t Number(const char* name, uint64_t most) {
    uint64_t value = 0;
    const std::optional<Json> found = object_.Find(name);
    if (!found.has_value() || !found->Get(&value) || value > most) Fault(name);
    return std::min(value, most);
  }
  std::string Text(const char* name) { return Member(name, Json::Kind::kString).string(); }
  Json::Items Items(const char* name) { return Member(name, Json::Kind::kArray).items(); }
  Json Object(const char* name) { return Member(name, Json::Kind::kObject); }
  void Ids(const char* name, std::vector<std::string>* ids) {
    for (const Json& id : Items(name)) {
      ids->push_back(id.string());
      if (!IsId(ids->back())) Fault(name);
    }
  }
  void Fault(const char* name) {
    if (status_->ok()) *status_ = DataLoss(file_ + " is damaged: its member " + name + " is wrong");
  }

 private:
  // A null if there is no member of this kind.
  Json Member(const char* name, Json::Kind kind) {
    const std::optional<Json> found = object_.Find(name);
    if (found.has_value() && found->kind() == kind) return *found;
    Fault(name);
    return Json();
  }

  const std::string& file_;
  const Json object_;
  Status* status_;
};

// The header of an .npy file, as numpy.save writes it, padded to 128 bytes.
std::string NpyHeader(const char* descr, uint64_t rows, int64_t width) {
  std::string text = "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (" +
                     std::to_string(rows) + (width == 0 ? "," : ", " + std::to_string(width)) +
                     "), }";
  text.resize(kNpyHeaderBytes - 11, ' ');
  return std::string("\x93NUMPY\x01\x00", 8) +
         std::string({static_cast<char>(kNpyHeaderBytes - 10), '\0'}) + text + "\n";
}

// Reads an entry of a file: its name, its size, which can be known, and its checksums.
void ReadFileEntry(Members members, std::optional<uint64_t> bytes, uint64_t block_bytes,
                   const Status& status, ColumnEntry* entry) {
  entry->file = members.Text("file");
  entry->bytes = members.Number("bytes", kMostNumber);
  if (bytes.has_value() && entry->bytes != *bytes) members.Fault("bytes");
  const bool plain = entry->file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos &&
                     entry->file != "." && entry->file != ".." && !entry->file.empty();
  if (!plain) members.Fault("file");
  const std::string digits = members.Text("crc32c");
  if (!status.ok()) return;
  const uint64_t blocks = (entry->bytes + block_bytes - 1) / block_bytes;
  if (digits.size() != 8 * blocks) return members.Fault("crc32c");
  for (size_t i = 0; i < digits.size(); i += 8) {
    uint32_t crc = 0;
    const char* const first = digits.data() + i;
    const auto [end, error] = std::from_chars(first, first + 8, crc, 16);
    if (error != std::errc() || end != first + 8) return members.Fault("crc32c");
    entry->crcs.push_back(crc);
  }
}

// Reads the entry of a column of `rows` rows of `width` elements (0: the column has one dimension).
void ReadColumn(Members files, const Json& object, const std::string& name, const char* descr,
                size_t element, uint64_t rows, int64_t width, uint64_t block_bytes,
                const std::string& where, Status* status, ShardEntry* shard) {
  if (!object.Find(name).has_value()) return files.Fault(name.c_str());
  Members members(where, files.Object(name.c_str()), status);
  ColumnEntry column;
  column.header = NpyHeader(descr, rows, width);
  const uint64_t bytes_per_row = element * static_cast<uint64_t>(std::max<int64_t>(width, 1));
  // At most 2^40 rows of 2^20 elements, so that nothing overflows.
  ReadFileEntry(members, kNpyHeaderBytes + rows * bytes_per_row, block_bytes, *status, &column);
  if (status->ok()) shard->columns[name] = std::move(column);
}

// Reads the entries of files of dense variables, of which models need one.
void ReadDense(const std::string& file, const Json::Items& entries, Status* status,
               Manifest* manifest) {
  bool has_others = false;  // the weights of other ranks
  for (const Json& json : entries) {
    Members members(file, json, status);
    ColumnEntry entry;
    ReadFileEntry(members, std::nullopt, manifest->block_bytes, *status, &entry);
    const std::string part = members.Text("part");
    const uint64_t rank = members.Number("rank", kMostNumber);
    if (part != "weights" && part != "training") members.Fault("part");
    if (part != "weights") continue;
    if (rank != 0) {
      has_others = true;
    } else {
      if (manifest->dense.has_value()) members.Fault("part");
      manifest->dense = std::move(entry);
    }
  }
  if (has_others && !manifest->dense.has_value() && status->ok()) {
    *status = DataLoss(file + " is damaged: its member dense is wrong");
  }
}

void ReadShard(const std::string& file, const Json& json, const Manifest& manifest,
               const TableEntry& table, bool has_salt, Status* status, ShardEntry* shard) {
  constexpr uint64_t kIndexRows = 0xFFFFFFFF;
  constexpr uint64_t kMostRows = uint64_t{1} << 40;
  Members members(file, json, status);
  shard->rows = members.Number("rows", kMostRows);
  shard->deleted = members.Number("deleted", kMostRows);
  shard->index_salt = has_salt ? members.Number("index_salt", ~uint64_t{0}) : 0;
  if (manifest.is_base && shard->deleted != 0) members.Fault("deleted");
  if (!status->ok()) return;
  const Json object = members.Object("files");
  const Members files(file, object, status);
  const auto read = [&](const char* name, const char* descr, size_t element, uint64_t rows,
                        int64_t width) {
    if (status->ok()) {
      ReadColumn(files, object, name, descr, element, rows, width, manifest.block_bytes, file,
                 status, shard);
    }
  };
  const char* const keys = table.key_type == KeyType::kInt32    ? "<i4"
                           : table.key_type == KeyType::kUint64 ? "<u8"
                                                                : "<i8";
  const char* const vectors = table.format == VectorFormat::kFloat32    ? "<f4"
                              : table.format == VectorFormat::kFloat16  ? "<f2"
                              : table.format == VectorFormat::kBfloat16 ? "<u2"
                              : table.format == VectorFormat::kInt8     ? "|i1"
                                                                        : "|u1";
  read("keys", keys, SizeOf(table.key_type), shard->rows, 0);
  read("vectors", vectors, ElementBytes(table.format), shard->rows,
       ElementsOf(table.format, table.dim));
  if (!manifest.is_base) {
    read("deleted", keys, SizeOf(table.key_type), shard->deleted, 0);
  } else if (shard->rows < kIndexRows) {
    uint32_t log_slots = 2;
    while ((uint64_t{1} << log_slots) < 2 * shard->rows) ++log_slots;
    shard->log_slots = log_slots;
    read("index", "<u4", sizeof(uint32_t), uint64_t{1} << log_slots, 0);
  }
}

void ReadTable(const std::string& file, const Json& json, const Manifest& manifest, bool has_salt,
               Status* status, TableEntry* table) {
  constexpr uint64_t kMostDim = uint64_t{1} << 20;
  Members members(file, json, status);
  table->name = members.Text("name");
  table->dim = static_cast<int64_t>(members.Number("dimension", kMostDim));
  if (table->dim == 0) members.Fault("dimension");
  const std::string key_type = members.Text("key_type");
  const std::string dtype = members.Text("dtype");
  if (key_type == "int32") {
    table->key_type = KeyType::kInt32;
  } else if (key_type == "uint64") {
    table->key_type = KeyType::kUint64;
  } else if (key_type != "int64") {
    members.Fault("key_type");
  }
  if (dtype == "float16") {
    table->dtype = DType::kFloat16;
  } else if (dtype == "bfloat16") {
    table->dtype = DType::kBfloat16;
  } else if (dtype != "float32") {
    members.Fault("dtype");
  }
  table->format = FormatOf(table->dtype);
  if (const std::optional<Json> rows = json.Find("vector_format"); rows && !rows->is_null()) {
    const std::string format = members.Text("vector_format");
    const auto* const known =
        std::find(std::begin(kVectorFormats), std::end(kVectorFormats), format);
    if (known == std::end(kVectorFormats)) return members.Fault("vector_format");
    table->format = static_cast<VectorFormat>(known - kVectorFormats);
  }
  if (const std::optional<Json> history = json.Find("history"); history && !history->is_null()) {
    table->history = members.Text("history");
    if (!IsId(table->history)) members.Fault("history");
  }
  for (const Json& shard : members.Items("shards")) {
    if (!status->ok()) return;
    table->shards.emplace_back();
    ReadShard(file, shard, manifest, *table, has_salt, status, &table->shards.back());
  }
  if (status->ok() && table->shards.empty()) members.Fault("shards");
}

// Whether no table and no file is there twice.
bool HasUniqueNames(const Manifest& manifest) {
  std::set<std::string> tables, files;
  if (manifest.dense.has_value()) files.insert(manifest.dense->file);
  for (const TableEntry& table : manifest.tables) {
    if (!tables.insert(table.name).second) return false;
    for (const ShardEntry& shard : table.shards) {
      for (const auto& [name, column] : shard.columns) {
        if (!files.insert(column.file).second) return false;
      }
    }
  }
  return true;
}

// NUMBER-KIND-ID
struct Name {
  uint64_t number = 0;
  std::string kind, id, text;
  bool operator<(const Name& o) const {
    return std::tie(number, kind, id) < std::tie(o.number, o.kind, o.id);
  }
};

bool ParseName(const std::string& text, Name* name) {
  constexpr size_t kFewestDigits = 8;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, name->number);
  const auto digits = static_cast<size_t>(stop - text.data());
  if (error != std::errc() || digits < kFewestDigits) return false;
  const std::string rest(stop, end);
  for (const char* const kind : {"base", "delta"}) {
    const std::string before = std::string("-") + kind + "-";
    if (rest.compare(0, before.size(), before) != 0 || !IsId(rest.substr(before.size()))) continue;
    name->kind = kind;
    name->id = rest.substr(before.size());
    name->text = text;
    return true;
  }
  return false;
}

std::string Basename(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path;
  const size_t slash = path.find_last_of('/', end);
  return path.substr(slash == std::string::npos ? 0 : slash + 1,
                     end - (slash == std::string::npos ? 0 : slash + 1) + 1);
}

// The snapshots at a path, in any order; if the directory `from` belongs to one of them, only the
// snapshots from its number on.
Status ListNames(const std::string& path, const std::string& from, std::vector<Name>* names) {
  Name first;
  const bool has_first = ParseName(Basename(from), &first);
  bool found = !has_first;
  DIR* const opened = opendir(path.c_str());
  if (opened == nullptr) {
    return errno == ENOENT || errno == ENOTDIR
               ? DataLoss(path + " holds no snapshot: it is missing")
               : ResourceExhausted(path + ": " + strerror(errno));
  }
  const dirent* entry;
  while ((errno = 0, entry = readdir(opened)) != nullptr) {
    const std::string_view text = entry->d_name;
    uint64_t number = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), number).ec != std::errc()) continue;
    Name name;
    if (number < first.number || !ParseName(std::string(text), &name)) continue;
    found = found || name.text == first.text;
    names->push_back(std::move(name));
  }
  const int error = errno;
  closedir(opened);
  if (error != 0) return ResourceExhausted(path + ": " + strerror(error));
  if (found) return Status();
  names->clear();
  return ListNames(path, "", names);
}

}  // namespace

Status ReadManifest(const std::string& directory, Manifest* manifest) {
  *manifest = Manifest();
  manifest->directory = directory;
  const std::string file = directory + "/MANIFEST.json";
  Json json;
  DYNEMB_RETURN_IF_ERROR(ReadJson(file, kMostManifestBytes, &json));
  Status status;
  Members members(file, json, &status);
  if (members.Text("format") != "tf_dynemb.snapshot") members.Fault("format");
  const uint64_t version = members.Number("version", kMostNumber);
  DYNEMB_RETURN_IF_ERROR(status);
  if (version == 3 || version == 5) {
    return InvalidArgument(
        file + " is of version " + std::to_string(version) + ": the delta of an optimizer with " +
        "catch_up and weight_decay, which shrinks rows that it does not have. " +
        "An exported model does not apply such deltas: publish a dump, or export it again");
  }
  if (version != 1 && version != 2 && version != 4) {
    return InvalidArgument(
        file + " is of version " + std::to_string(version) +
        "; this tf_dynemb reads versions 1, 2 and 4. Read it with the tf_dynemb " +
        "that wrote it, or a later one");
  }
  DYNEMB_RETURN_IF_ERROR(CheckChecksum(file, json));

  const std::string kind = members.Text("kind");
  manifest->is_base = kind == "base";
  if (!manifest->is_base && kind != "delta") members.Fault("kind");
  manifest->id = members.Text("id");
  if (!IsId(manifest->id)) members.Fault("id");
  if (const std::optional<Json> parent = json.Find("parent"); parent && !parent->is_null()) {
    manifest->parent = members.Text("parent");
    if (manifest->is_base || !IsId(manifest->parent)) members.Fault("parent");
  }
  if (json.Find("continues").has_value()) {
    members.Ids("continues", &manifest->continues);
  }
  if (json.Find("after").has_value()) members.Ids("after", &manifest->after);
  if (!manifest->is_base && !manifest->continues.empty()) members.Fault("continues");
  if (!manifest->is_base && !manifest->after.empty()) members.Fault("after");
  manifest->since = members.Number("since", manifest->is_base ? 0 : kMostNumber);
  manifest->watermark = members.Number("watermark", kMostNumber);
  manifest->watermark_utc_ns = members.Number("watermark_utc_ns", ~uint64_t{0} >> 1);
  manifest->block_bytes = members.Number("block_bytes", uint64_t{1} << 30);
  if (manifest->block_bytes < kNpyHeaderBytes) members.Fault("block_bytes");
  for (const Json& table : members.Items("tables")) {
    DYNEMB_RETURN_IF_ERROR(status);
    manifest->tables.emplace_back();
    ReadTable(file, table, *manifest, version > 1, &status, &manifest->tables.back());
  }
  if (const std::optional<Json> dense = json.Find("dense"); dense && !dense->is_null()) {
    ReadDense(file, members.Items("dense"), &status, manifest);
  }
  if (!HasUniqueNames(*manifest)) members.Fault("tables");
  DYNEMB_RETURN_IF_ERROR(status);
  const std::string id = IdOfDirectory(directory);
  if (!id.empty() && id != manifest->id) {
    return DataLoss(file + " is of another snapshot: " + manifest->id);
  }
  return Status();
}

std::string IdOfDirectory(const std::string& directory) {
  Name name;
  return ParseName(Basename(directory), &name) ? name.id : std::string();
}

Status ListChain(const std::string& path, const std::string& from,
                 std::vector<std::string>* directories) {
  directories->clear();
  if (access((path + "/MANIFEST.json").c_str(), F_OK) == 0) {
    directories->push_back(path);
    return Status();
  }
  if (errno != ENOENT && errno != ENOTDIR) {
    return ResourceExhausted(path + "/MANIFEST.json: " + strerror(errno));
  }
  std::vector<Name> names;
  DYNEMB_RETURN_IF_ERROR(ListNames(path, from, &names));
  if (names.empty()) return DataLoss(path + " holds no snapshot");
  std::sort(names.begin(), names.end());
  auto first = names.begin();
  for (auto it = names.begin(); it != names.end(); ++it) {
    if (it->kind == "base") first = it;
  }
  for (auto it = first; it != names.end(); ++it) directories->push_back(path + "/" + it->text);
  return Status();
}

}  // namespace dynemb
