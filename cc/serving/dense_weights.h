// DenseWeights: the dense weights of a model as of one snapshot, arrays by name.
//
// They are the file of weights that rank 0 wrote (docs/file_format.md, "dense"), in the format of
// the safetensors library. It is verified and stays mapped, as the files of bases do. Arrays that
// are not aligned in it as TensorFlow needs it are copied; tf_dynemb writes the arrays in an order
// in which few are not.
//
// Immutable.
#ifndef DYNEMB_SERVING_DENSE_WEIGHTS_H_
#define DYNEMB_SERVING_DENSE_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cc/io/manifest.h"
#include "cc/serving/verified_file.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

struct DenseWeight {
  std::string dtype;  // the name in the file, such as "F32"
  std::vector<int64_t> shape;
  const char* data = nullptr;  // little-endian, in C order, aligned to kAlignment
  size_t bytes = 0;
};

class DenseWeights {
 public:
  static constexpr size_t kAlignment = 64;

  // Reads the weights of a snapshot that has some. DataLoss names the file.
  static Status Read(Exec& exec, const Manifest& manifest,
                     std::shared_ptr<const DenseWeights>* weights);
  DenseWeights(const DenseWeights&) = delete;
  DenseWeights& operator=(const DenseWeights&) = delete;

  // Null if there is none with this name.
  const DenseWeight* Find(const std::string& name) const;
  size_t size() const { return weights_.size(); }

  // In which name, dtype or shape these weights differ from others, as text; empty: in none.
  std::string DifferenceFrom(const DenseWeights& o) const;

 private:
  struct Free {
    void operator()(char* data) const;
  };

  DenseWeights() = default;

  std::map<std::string, DenseWeight> weights_;
  std::unique_ptr<VerifiedFile> file_;
  std::unique_ptr<char, Free> unaligned_;  // copies of the arrays that are not aligned in the file
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DENSE_WEIGHTS_H_
