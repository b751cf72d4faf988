// TableResource: a Table as a TensorFlow resource, and the functions that all kernels share.
#ifndef DYNEMB_TF_TABLE_RESOURCE_H_
#define DYNEMB_TF_TABLE_RESOURCE_H_

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cc/lookup/lookups.h"
#include "cc/table/clock.h"
#include "cc/table/table.h"
#include "cc/tf/place.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace dynemb {

class ServedResource;

class TableResource : public tf::ResourceBase {
 public:
  TableResource(std::shared_ptr<Table> table, Lookups* lookups)
      : table_(std::move(table)), lookups_(lookups) {}
  // Non-null for a table of an exported model (served_resource.h), which has no table() itself.
  virtual ServedResource* served() { return nullptr; }
  Table& table() { return *table_; }
  // The calls over several tables in this table's place.
  Lookups& lookups() { return *lookups_; }
  std::string DebugString() const override;
  int64_t MemoryUsed() const override;

 private:
  std::shared_ptr<Table> table_;
  Lookups* const lookups_;
};

// The clock of this process. A batch takes its tick while it holds the locks of its tables.
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

// The same status; bytes of its message that are not UTF-8, such as those of a name in a damaged
// file, are written as \xff: Python reports a message that it cannot decode as another error.
absl::Status Decodable(const absl::Status& status);

// The base of all kernels. The operator fails if Run does; no exception leaves Compute.
class DynembOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* ctx) final;

 protected:
  virtual absl::Status Run(tf::OpKernelContext* ctx) = 0;
};

using TableRef = tf::core::RefCountPtr<TableResource>;

// Gets the table of the scalar resource `handle`, which must be on the operator's device. For a
// table of an exported model, that is the table as of one snapshot, the same for all operators of a
// step.
absl::Status GetTable(tf::OpKernelContext* ctx, const tf::Tensor& handle, TableRef* table);
// The same for a table on any device, for operators whose arrays are all on the host.
absl::Status GetTableOnAnyDevice(tf::OpKernelContext* ctx, const tf::Tensor& handle,
                                 TableRef* table);
// Gets the tables of a list of handles, which must all be on the operator's device.
absl::Status GetTables(tf::OpKernelContext* ctx, int first, int n, std::vector<TableRef>* refs,
                       std::vector<Table*>* tables);
// The first of the tables' errors (Table::Error). Called after a call over several tables, which
// reports only what kept it from its work.
absl::Status ErrorOf(const std::vector<Table*>& tables);
// The base of operators on one table, which input 0 names.
class OneTableOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) final;
  // If this succeeds, the caller returns the table's Error.
  virtual absl::Status Run(tf::OpKernelContext* ctx, Table& table) = 0;
};

// Gets the calls over these tables, of which there is at least one. InvalidArgument if they are in
// different places; the message names two of them.
absl::Status CommonLookups(const std::vector<TableRef>& tables, Lookups** lookups);

// For a call of the library that has a callback for allocating its outputs: preserves the error of
// the callback, which is an absl::Status.
//
//   Placing placing;
//   return placing.Result(exchange->ReceiveKeys(exec, ..., [&](auto... args) {
//     return placing.Keep(Place(ctx, args...));  // an absl::Status
//   }));
class Placing {
 public:
  Status Keep(absl::Status status) {
    status_ = std::move(status);
    return status_.ok() ? Status() : Status(Code::kInternal, std::string(status_.message()));
  }
  absl::Status Result(const Status& status) const {
    return status_.ok() ? ToAbsl(status) : status_;
  }

 private:
  absl::Status status_;
};

// Lookups::SumGradients, with an `allocate` that returns an absl::Status.
absl::Status SumGradients(Lookups* lookups, Exec& exec, const std::vector<BackwardTask>& tasks,
                          const std::function<absl::Status(size_t task, int64_t unique,
                                                           BackwardOutput* output)>& allocate);

// Checks whose messages name the argument, the expected value and the actual value.
absl::Status CheckKeys(const Table& table, const tf::Tensor& keys, const char* name);
// The keys of a tensor that passed CheckKeys, flattened.
KeySpan KeysOf(const tf::Tensor& keys);
// `values` has the shape of `keys` with dim appended.
absl::Status CheckVectors(const tf::Tensor& keys, const tf::Tensor& values, int64_t dim,
                          const char* name);
absl::Status CheckDType(const Table& table, tf::DataType dtype, const char* name);
absl::Status CheckShape(const tf::Tensor& tensor, const tf::TensorShape& shape, const char* name);
// `dims` may be any numbers: unlike a TensorShape's, their product may overflow.
absl::Status CheckShape(const tf::Tensor& tensor, std::initializer_list<int64_t> dims,
                        const char* name);
absl::Status CheckScalar(const tf::Tensor& tensor, const char* name);
// Fails unless `width`, the width of vectors in a tensor, is one that a table may have.
absl::Status CheckWidth(int64_t width, const char* name);

// Allocates output `index` in the memory that the kernel's registration names, and sets `data` to
// the address of its elements.
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
