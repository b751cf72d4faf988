// TableResource: a Table as a TensorFlow resource, and what every kernel needs to reach it.
#ifndef DYNEMB_TF_TABLE_RESOURCE_H_
#define DYNEMB_TF_TABLE_RESOURCE_H_

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/clock.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace dynemb {

namespace tf = tensorflow;

class TableResource : public tf::ResourceBase {
 public:
  explicit TableResource(std::unique_ptr<Table> table) : table_(std::move(table)) {}
  Table& table() { return *table_; }
  std::string DebugString() const override;
  int64_t MemoryUsed() const override;

 private:
  std::unique_ptr<Table> table_;
};

// The clock that numbers the batches of this process. Take a tick while holding the locks of its
// tables.
Clock& ProcessClock();

absl::Status ToAbsl(const Status& status);
#define DYNEMB_RETURN_IF_LIBRARY_ERROR(expr)                         \
  do {                                                               \
    const ::dynemb::Status dynemb_status = (expr);                   \
    if (!dynemb_status.ok()) return ::dynemb::ToAbsl(dynemb_status); \
  } while (false)

KeyType ToKeyType(tf::DataType dtype);
DType ToDType(tf::DataType dtype);
tf::DataType ToTf(KeyType type);
tf::DataType ToTf(DType type);

// An operator of this library. Run's error becomes the operator's; no exception leaves Compute.
class DynembOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* ctx) final;

 protected:
  virtual absl::Status Run(tf::OpKernelContext* ctx) = 0;
};

// TensorFlow's intra-op threads as an Exec.
PoolExec MakeExec(tf::OpKernelContext* ctx);

using TableRef = tf::core::RefCountPtr<TableResource>;

// The table of the scalar resource `handle`.
absl::Status GetTable(tf::OpKernelContext* ctx, const tf::Tensor& handle, TableRef* table);

// Checks with messages that name the argument, the expectation and what came.
absl::Status CheckKeys(const Table& table, const tf::Tensor& keys, const char* name);
// `values` has the shape of `keys` with dim appended.
absl::Status CheckVectors(const tf::Tensor& keys, const tf::Tensor& values, int64_t dim,
                          const char* name);
absl::Status CheckDType(const Table& table, tf::DataType dtype, const char* name);
absl::Status CheckShape(const tf::Tensor& tensor, const tf::TensorShape& shape, const char* name);
// Any numbers may be given: unlike a TensorShape's, their product may overflow.
absl::Status CheckShape(const tf::Tensor& tensor, std::initializer_list<int64_t> dims,
                        const char* name);
absl::Status CheckScalar(const tf::Tensor& tensor, const char* name);
// The width of vectors, taken from a tensor's shape, is one that a table may have.
absl::Status CheckWidth(int64_t width, const char* name);

// Allocates output `index` and gives its elements' address.
absl::Status AllocateOutput(tf::OpKernelContext* ctx, int index, const tf::TensorShape& shape,
                            void** data);
template <class T>
absl::Status Output(tf::OpKernelContext* ctx, int index, const tf::TensorShape& shape, T** data) {
  void* elements = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, index, shape, &elements));
  *data = static_cast<T*>(elements);
  return absl::OkStatus();
}

template <class T>
const T* Data(const tf::Tensor& tensor) {
  return reinterpret_cast<const T*>(tensor.data());
}

}  // namespace dynemb

#endif  // DYNEMB_TF_TABLE_RESOURCE_H_
