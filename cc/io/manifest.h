// Manifest: MANIFEST.json of a published snapshot, as far as lookups need it; and the snapshots of
// a path. docs/file_format.md defines both; tf_dynemb/format/manifest.py is the other reader.
//
// Contract. ReadManifest verifies the checksum of the manifest, and that its entries are consistent
// with each other: the size of each file follows from rows, types and dimension. It does not open
// the files. Unknown members are ignored. Errors are DataLoss that names the file, or
// InvalidArgument if the file is of an unknown version.
#ifndef DYNEMB_IO_MANIFEST_H_
#define DYNEMB_IO_MANIFEST_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cc/table/status.h"
#include "cc/table/types.h"
#include "cc/table/vector_format.h"

namespace dynemb {

struct ColumnEntry {
  std::string file;            // the name in the directory of the snapshot
  std::string header;          // the first bytes that the file must have; empty: not known
  uint64_t bytes = 0;          // of the file
  std::vector<uint32_t> crcs;  // one for each block
};

struct ShardEntry {
  uint64_t rows = 0;
  uint64_t deleted = 0;
  uint64_t index_salt = 0;
  uint32_t log_slots = 0;  // of the index
  // keys, vectors, and if the file has them, index and deleted.
  std::map<std::string, ColumnEntry> columns;
};

struct TableEntry {
  std::string name;
  int64_t dim = 0;
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;                 // of the trained table
  VectorFormat format = VectorFormat::kFloat32;  // of the rows in these files
  std::string history;  // of which table these rows are a state; empty if unknown
  std::vector<ShardEntry> shards;
};

struct Manifest {
  std::string directory;
  bool is_base = false;
  std::string id;
  std::string parent;                  // of a delta; empty if unknown
  std::vector<std::string> continues;  // of a base
  std::vector<std::string> after;      // of a base: ids of older snapshots
  uint64_t since = 0;
  uint64_t watermark = 0;
  uint64_t watermark_utc_ns = 0;
  uint64_t block_bytes = 0;
  std::vector<TableEntry> tables;
  std::optional<ColumnEntry> dense;  // the dense weights of a model, as rank 0 has written them
};

constexpr size_t kNpyHeaderBytes = 128;

Status ReadManifest(const std::string& directory, Manifest* manifest);

// The directories of the snapshots at a path, from the last base on, in the order of publication;
// all, if there is no base. If `from`, the directory of a snapshot, has the name of one of them,
// only the directories from it on: a reader of a long chain then does not sort it again. If the
// path is itself a snapshot, only the path. DataLoss if there is none; ResourceExhausted for other
// errors, which do not mean that something is absent.
Status ListChain(const std::string& path, const std::string& from,
                 std::vector<std::string>* directories);

// The id in the name of a snapshot's directory; empty if the name is not of this form.
std::string IdOfDirectory(const std::string& directory);

}  // namespace dynemb

#endif  // DYNEMB_IO_MANIFEST_H_
