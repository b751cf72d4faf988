// StagedTable: a table in a GPU's memory, for tests whose arrays are in host memory. Each call
// copies its arrays to the GPU's memory, waits, and copies the outputs back. That memory is not
// managed: an access from the host is a fault, as with TensorFlow's tensors.
#ifndef DYNEMB_TESTS_CUDA_STAGED_TABLE_H_
#define DYNEMB_TESTS_CUDA_STAGED_TABLE_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/device/cuda_device.h"
#include "cc/device/cuda_table.h"
#include "cc/table/table.h"

namespace dynemb {

class StagedTable final : public Table {
 public:
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    std::unique_ptr<Table> on_gpu;
    DYNEMB_RETURN_IF_ERROR(MakeCudaTable(options, /*ordinal=*/0, &on_gpu));
    table->reset(new StagedTable(std::move(on_gpu)));
    return Status();
  }

  // The reason why there can be no such table; empty if there can be one.
  static std::string Missing() {
    CudaDevice* device = nullptr;
    const Status status = CudaDevice::Get(0, &device);
    return status.ok() ? "" : "no GPU here: " + status.message();
  }

  const RowLayout& layout() const override { return t_->layout(); }
  uint64_t size() const override { return t_->size(); }
  TableStats stats() const override { return t_->stats(); }
  Status ResetState(Exec& exec, const StateSpec& spec) override {
    const Status status = t_->ResetState(exec, spec);
    CopyState();
    return status;
  }
  Status Clear(Exec& exec, Tick tick) override { return t_->Clear(exec, tick); }
  Stamp BeginBatch(Exec& exec, Tick tick, size_t n) override {
    return t_->BeginBatch(exec, tick, n);
  }
  Stamp BeginLookup(Exec& exec, Tick tick, size_t n) override {
    return t_->BeginLookup(exec, tick, n);
  }
  Status AdvanceEpoch(Exec& exec) override { return t_->AdvanceEpoch(exec); }
  void Scores(Exec& exec, KeySpan keys, int64_t* scores) const override {
    Staging s;
    t_->Scores(exec, Keys(s, keys), scores);
  }
  void Explain(Exec& exec, KeySpan keys, KeyState* states) const override {
    Staging s;
    t_->Explain(exec, Keys(s, keys), states);
  }
  Status AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) override {
    Staging s;
    return t_->AddCounts(exec, Keys(s, keys), counts);
  }
  Status SetScores(Exec& exec, KeySpan keys, const Score* scores) override {
    Staging s;
    return t_->SetScores(exec, Keys(s, keys), scores);
  }

  void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override {
    Staging s;
    const size_t n = keys.size();
    t_->Find(exec, Keys(s, keys), tick, s.InOut(rows, n));
  }
  void Contains(Exec& exec, KeySpan keys, bool* found) const override {
    Staging s;
    const size_t n = keys.size();
    t_->Contains(exec, Keys(s, keys), s.InOut(found, n));
  }
  void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector, void* vectors,
              RowId* rows) override {
    Staging s;
    const size_t n = keys.size();
    const size_t bytes = layout().vector_bytes();
    t_->Lookup(exec, Keys(s, keys), tick, s.In(default_vector, bytes), s.InOut(vectors, n * bytes),
               s.InOut(rows, n));
  }
  void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state,
                bool* found) const override {
    Staging s;
    const size_t n = keys.size();
    t_->ReadRows(exec, Keys(s, keys), s.InOut(vectors, n * Dim()), s.InOut(state, n * StateWidth()),
                 s.InOut(found, n));
  }
  void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n, Tick since,
               Tick now, bool* changed) const override {
    Staging s;
    t_->Changed(exec, s.In(rows, n), s.In(rows_before, n), n, since, now, s.InOut(changed, n));
  }
  Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override {
    Staging s;
    const size_t n = keys.size();
    return t_->FindOrInsert(exec, Keys(s, keys), tick, s.InOut(rows, n));
  }
  Status InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                        EvictedRows* evicted) override {
    Staging s;
    const size_t n = keys.size();
    const auto on_device = [&](size_t num) {
      const TickColumns& to = evicted->Place(num);
      return TickColumns{s.InOut(to.keys, num * layout().key_size),
                         s.InOut(to.vectors, num * layout().vector_bytes()),
                         s.InOut(to.state, num * StateWidth()), nullptr, s.InOut(to.scores, num)};
    };
    EvictedRows staged(layout(), on_device, EvictedRows::Memory::kDevice);
    DYNEMB_RETURN_IF_ERROR(
        t_->InsertAndEvict(exec, Keys(s, keys), tick, s.InOut(rows, n), &staged));
    staged.Finish();
    return Status();
  }
  Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors, RowId* rows) override {
    Staging s;
    const size_t n = keys.size();
    return t_->LookupOrInsert(exec, Keys(s, keys), tick,
                              s.InOut(vectors, n * layout().vector_bytes()), s.InOut(rows, n));
  }
  Status Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) override {
    Staging s;
    const size_t n = keys.size();
    return t_->Upsert(exec, Keys(s, keys), s.In(vectors, n * layout().vector_bytes()), tick);
  }
  Status Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) override {
    Staging s;
    const size_t n = keys.size();
    return t_->Accumulate(exec, Keys(s, keys), s.In(deltas, n * Dim()), tick);
  }
  Status WriteRows(Exec& exec, KeySpan keys, const float* vectors, const float* state, bool insert,
                   uint64_t step, Tick tick) override {
    Staging s;
    const size_t n = keys.size();
    return t_->WriteRows(exec, Keys(s, keys), s.In(vectors, n * Dim()),
                         s.In(state, n * StateWidth()), insert, step, tick);
  }
  size_t Erase(Exec& exec, KeySpan keys, Tick tick, Removal how) override {
    Staging s;
    return t_->Erase(exec, Keys(s, keys), tick, how);
  }
  void ApplyRange(Exec& exec, const RowOptimizer& optimizer, KeySpan keys, const RowId* rows,
                  const float* gradients, size_t begin, size_t end, uint64_t step,
                  Tick tick) override {
    Staging s;
    t_->ApplyRange(exec, optimizer, Keys(s, keys), s.In(rows, end), s.In(gradients, end * Dim()),
                   begin, end, step, tick);
  }

  Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times, Tick tick, void* vectors,
                       RowId* rows) override {
    Staging s;
    const size_t n = keys.size();
    return t_->LookupCounted(exec, Keys(s, keys), times, tick,
                             s.InOut(vectors, n * layout().vector_bytes()), s.InOut(rows, n));
  }
  Status LoadAdmission(const uint64_t* lines, int64_t first, int64_t num, bool merge) override {
    return t_->LoadAdmission(lines, first, num, merge);
  }

  Status Expire(Exec& exec, Tick tick, uint64_t* expired) override {
    return t_->Expire(exec, tick, expired);
  }
  Status SetDataTime(int64_t time, Tick tick) override { return t_->SetDataTime(time, tick); }
  std::vector<int64_t> ExpiryMarks(Tick tick) override { return t_->ExpiryMarks(tick); }
  Status SetExpiryMarks(const std::vector<int64_t>& marks) override {
    return t_->SetExpiryMarks(marks);
  }

  // The arrays of these calls are in host memory in any case.
  ExportPlan SelectRows(Exec& exec, uint64_t cursor, uint64_t limit,
                        const RowPredicate& where) const override {
    return t_->SelectRows(exec, cursor, limit, where);
  }
  void CopyRows(Exec& exec, const std::vector<RowId>& rows, const TickColumns& to) const override {
    t_->Export(exec, {rows, -1}, to);
  }
  void BringKeys(Exec& exec, KeySpan keys) override {
    Staging s;
    t_->BringKeys(exec, Keys(s, keys));
  }
  Status BeginStep(Exec& exec, OptimizerFlags flags, const Hyper& hyper, Tick tick) override {
    const Status status = t_->BeginStep(exec, flags, hyper, tick);
    catch_up_ = t_->catch_up();
    return status;
  }
  void EndStep(Exec& exec, const Hyper& hyper, uint64_t iteration, Tick tick) override {
    t_->EndStep(exec, hyper, iteration, tick);
    catch_up_ = t_->catch_up();
  }
  Status LoadSteps(Exec& exec, const std::vector<double>& saved, Tick tick) override {
    const Status status = t_->LoadSteps(exec, saved, tick);
    catch_up_ = t_->catch_up();
    return status;
  }
  // Not called: the three calls above are those of the table on the GPU.
  uint64_t BringRows(Exec&, uint64_t, uint64_t) override { return 0; }
  void MarkRows(Exec&, float) override {}
  void MarkNewRows(Exec&, float) override {}
  Status BeginCut(Exec& exec, Tick watermark, Tick since, CutOf of, SavedRows* saved,
                  size_t number) override {
    return t_->BeginCut(exec, watermark, since, of, saved, number);
  }
  void EndCut() override { t_->EndCut(); }
  const Cut* cut() const override { return t_->cut(); }
  std::vector<RowId> PlanCut(size_t limit) override { return t_->PlanCut(limit); }
  bool CutIsRead() const override { return t_->CutIsRead(); }
  void ReadCut(Exec& exec, const std::vector<RowId>& plan, const CutColumns& to) override {
    t_->ReadCut(exec, plan, to);
  }
  bool tracking() const override { return t_->tracking(); }
  void Track(Tick tick) override { t_->Track(tick); }
  Status LoadRows(Exec& exec, const LoadedRows& rows, Tick tick) override {
    return t_->LoadRows(exec, rows, tick);
  }
  void SwapRows(Table* other, Tick tick) override {
    auto* const staged = static_cast<StagedTable*>(other);
    t_->SwapRows(staged->t_.get(), tick);
    CopyState();
    staged->CopyState();
  }
  Status Promote(Exec& exec, Tick tick) override { return t_->Promote(exec, tick); }
  void CheckInvariants() const override { t_->CheckInvariants(); }

 protected:
  // For EvictTo, which removes all expired rows before.
  ExportPlan ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const override {
    (void)most;
    return t_->SelectRows(exec, cursor, limit, where);
  }

 private:
  // Copies of a call's arrays in the GPU's memory. The destructor waits for the GPU's work, and
  // copies the InOut arrays back.
  class Staging {
   public:
    Staging() = default;
    ~Staging() {
      Require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (const Array& a : arrays_) {
        if (a.back != nullptr) Copy(a.back, a.copy, a.bytes, cudaMemcpyDeviceToHost);
        Require(cudaFree(a.copy), "cudaFree");
      }
    }
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    template <class T>
    const T* In(const T* array, size_t n) {
      return static_cast<const T*>(Bring(array, n * SizeOfElement<T>(), nullptr));
    }
    template <class T>
    T* InOut(T* array, size_t n) {
      return static_cast<T*>(Bring(array, n * SizeOfElement<T>(), array));
    }

   private:
    struct Array {
      void* copy;
      size_t bytes;
      void* back;
    };
    template <class T>
    static constexpr size_t SizeOfElement() {
      if constexpr (std::is_void_v<T>) {
        return 1;
      } else {
        return sizeof(T);
      }
    }
    static void Require(cudaError_t error, const char* call) {
      if (error == cudaSuccess) return;
      std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
      std::abort();
    }
    // Work of other streams may use `to` next, so this waits; cudaMemcpy from pageable memory may
    // return before the memory of the GPU has the bytes.
    static void Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
      if (bytes == 0) return;
      Require(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
      Require(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    }
    void* Bring(const void* array, size_t bytes, void* back) {
      if (array == nullptr) return nullptr;
      Array a{nullptr, bytes, back};
      Require(cudaMalloc(&a.copy, bytes == 0 ? 1 : bytes), "cudaMalloc");
      Copy(a.copy, array, bytes, cudaMemcpyHostToDevice);
      arrays_.push_back(a);
      return a.copy;
    }

    std::vector<Array> arrays_;
  };

  explicit StagedTable(std::unique_ptr<Table> table) : t_(std::move(table)) {
    options_ = t_->options();
    state_spec_ = t_->state_spec();
  }
  // This table's own copies of what Table's functions read, after a call that changes it.
  void CopyState() {
    state_spec_ = t_->state_spec();
    catch_up_ = t_->catch_up();
  }
  static KeySpan Keys(Staging& s, KeySpan keys) {
    return {keys.type(), s.In(keys.data(), keys.size() * SizeOf(keys.type())), keys.size()};
  }
  size_t Dim() const { return static_cast<size_t>(layout().dim); }
  size_t StateWidth() const { return static_cast<size_t>(layout().state_width); }

  std::unique_ptr<Table> t_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CUDA_STAGED_TABLE_H_
