#include "cc/serving/model_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cc/io/crc32c.h"
#include "cc/io/json.h"
#include "cc/io/json_file.h"
#include "cc/io/mapped_file.h"

namespace dynemb {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 30;
constexpr std::chrono::seconds kMemory{10};

// The files of a model that matched their checksums, including the file of checksums, and the time
// of the check.
struct Verified {
  std::vector<FileIdentity> files;
  std::chrono::steady_clock::time_point time;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Verified> models;  // by the path of the checksums
};

Registry& Models() {
  static Registry* const registry = new Registry;  // never destroyed: models may live until exit
  return *registry;
}

struct FileEntry {
  std::string path;
  uint64_t bytes = 0;
  std::string crc32c;
};

std::string Hex(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

std::string TextOf(const Json& json, const char* name) {
  const std::optional<Json> member = json.Find(name);
  return member.has_value() ? member->string() : std::string();
}

Status ReadChecksums(const std::string& file, const std::string& model,
                     std::vector<FileEntry>* entries) {
  constexpr size_t kMostText = size_t{1} << 24;
  Json json;
  DYNEMB_RETURN_IF_ERROR(ReadJson(file, kMostText, &json));
  DYNEMB_RETURN_IF_ERROR(CheckChecksum(file, json));
  const auto wrong = [&file](const char* name) {
    return DataLoss(file + " is damaged: its member " + name + " is wrong");
  };
  uint64_t version = 0;
  if (TextOf(json, "format") != "tf_dynemb.model_files") return wrong("format");
  const std::optional<Json> number = json.Find("version");
  if (!number.has_value() || !number->Get(&version)) return wrong("version");
  if (version != 1) {
    return InvalidArgument(file + " is of version " + std::to_string(version) +
                           "; this tf_dynemb reads version 1");
  }
  const std::optional<Json> files = json.Find("files");
  if (!files.has_value() || files->kind() != Json::Kind::kArray) return wrong("files");
  for (const Json& item : files->items()) {
    FileEntry entry;
    entry.path = TextOf(item, "file");
    entry.crc32c = TextOf(item, "crc32c");
    const std::optional<Json> bytes = item.Find("bytes");
    if (entry.path.empty() || !bytes.has_value() || !bytes->Get(&entry.bytes))
      return wrong("files");
    entry.path = model + entry.path;
    entries->push_back(std::move(entry));
  }
  return Status();
}

Status Crc32cOf(const std::string& path, uint32_t* crc) {
  constexpr size_t kBuffer = size_t{1} << 18;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return ResourceExhausted(path + ": " + strerror(errno));
  const std::unique_ptr<char[]> buffer(new char[kBuffer]);
  Status status;
  *crc = 0;
  for (;;) {
    const ssize_t got = read(file, buffer.get(), kBuffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = ResourceExhausted(path + ": " + strerror(errno));
    if (got <= 0) break;
    *crc = Crc32c(*crc, buffer.get(), static_cast<size_t>(got));
  }
  close(file);
  return status;
}

Status Verify(const FileEntry& entry, const FileIdentity& identity, const std::string& checksums) {
  const std::string advice =
      ". If a tool has changed the model on purpose, remove that file, and the model loads without "
      "this comparison";
  if (identity.bytes != entry.bytes) {
    return DataLoss(entry.path + " is damaged: it has " + std::to_string(identity.bytes) +
                    " bytes, and " + checksums + " says " + std::to_string(entry.bytes) + advice);
  }
  if (entry.bytes > kMostBytes) return Status();
  uint32_t crc = 0;
  DYNEMB_RETURN_IF_ERROR(Crc32cOf(entry.path, &crc));
  if (Hex(crc) != entry.crc32c) {
    return DataLoss(entry.path + " is damaged: its CRC32C is " + Hex(crc) + ", and " + checksums +
                    " says " + entry.crc32c + advice);
  }
  return Status();
}

}  // namespace

Status VerifyModelFiles(const std::string& descriptor) {
  const std::string assets = "assets/";
  const std::string folder = descriptor.substr(0, descriptor.find_last_of('/') + 1);
  const size_t begin = folder.size() - std::min(folder.size(), assets.size());
  if (folder.substr(begin) != assets || (begin > 0 && folder[begin - 1] != '/')) return Status();
  const std::string model = folder.substr(0, begin);
  const std::string checksums = model + "assets.extra/tf_dynemb.checksums.json";
  if (access(checksums.c_str(), F_OK) != 0 && errno == ENOENT) return Status();

  std::vector<FileEntry> entries;
  DYNEMB_RETURN_IF_ERROR(ReadChecksums(checksums, model, &entries));
  Verified now{std::vector<FileIdentity>(entries.size() + 1), std::chrono::steady_clock::now()};
  DYNEMB_RETURN_IF_ERROR(IdentifyFile(checksums, &now.files.back()));
  for (size_t i = 0; i < entries.size(); ++i) {
    DYNEMB_RETURN_IF_ERROR(IdentifyFile(entries[i].path, &now.files[i]));
  }
  Registry& registry = Models();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (auto it = registry.models.begin(); it != registry.models.end();) {
    it = now.time - it->second.time > kMemory ? registry.models.erase(it) : std::next(it);
  }
  const auto known = registry.models.find(checksums);
  if (known != registry.models.end() && known->second.files == now.files) return Status();
  for (size_t i = 0; i < entries.size(); ++i) {
    DYNEMB_RETURN_IF_ERROR(Verify(entries[i], now.files[i], checksums));
  }
  registry.models[checksums] = std::move(now);
  return Status();
}

}  // namespace dynemb
