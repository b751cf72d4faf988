// Background: the threads of a process that work for its tables while no call waits for them. So
// their number does not grow with the number of tables.
//
//   class Task : Background::Task { Pause Work() override; };
//   Background::Wake(&task);      // Work is called soon, and again as it says
//   Background::Remove(&task);    // before the task is destroyed
//
// The tasks that are due are worked on in turn, each by one thread at a time. A child of fork has
// no threads of its parent: the tasks that it has copies of are not worked on there, and Remove
// does not wait for them.
#ifndef DYNEMB_TABLE_BACKGROUND_H_
#define DYNEMB_TABLE_BACKGROUND_H_

#include <chrono>
#include <cstddef>

namespace dynemb {

class Background {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMostThreads = 4;

  class Task {
   public:
    Task() = default;
    virtual ~Task() = default;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;
    // Does a part of the work. Returns how long to wait before the next part; negative: until the
    // next Wake. A Wake during the call counts as one after it. Does not throw.
    virtual Clock::duration Work() noexcept = 0;

   private:
    friend class Background;
    enum class State { kIdle, kDue, kRunning } state_ = State::kIdle;
    int pid_ = 0;         // of the process that has this state
    bool woken_ = false;  // while it was running
    bool ends_ = false;   // Remove waits
    Clock::time_point due_;
    Task* next_ = nullptr;  // of those that are due
  };

  // Work is called after `pause`, unless that was said before. If no thread can be started, nothing
  // happens.
  static void Wake(Task* task, Clock::duration pause) noexcept;
  // Returns when Work is not running, and will not be called anymore unless there is another Wake.
  static void Remove(Task* task) noexcept;

 private:
  struct Process;
  static void Start(Process* process);
  static void Run(Process* process);
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BACKGROUND_H_
