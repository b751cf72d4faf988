#include "cc/table/background.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <thread>

#include "cc/table/monotonic.h"
#include "cc/table/process_state.h"

namespace dynemb {

struct Background::Process {
  void InChild() {
    new (&changed) MonotonicCondition;
    new (&ended) MonotonicCondition;
    threads = waiting = 0;
    due = nullptr;
  }
  void Add(Task* task, Clock::duration pause) {
    task->state_ = Task::State::kDue;
    task->due_ = Clock::now() + pause;
    task->next_ = due;
    due = task;
  }
  // The task that is due first; null if there is none.
  Task* First() const {
    Task* first = due;
    for (Task* task = due; task != nullptr; task = task->next_) {
      if (task->due_ < first->due_) first = task;
    }
    return first;
  }
  void Take(const Task* task) {
    for (Task** at = &due; *at != nullptr; at = &(*at)->next_) {
      if (*at != task) continue;
      *at = task->next_;
      return;
    }
  }

  std::mutex mutex;
  MonotonicCondition changed;  // tasks
  MonotonicCondition ended;    // a call of Work has
  size_t threads = 0, waiting = 0;
  Task* due = nullptr;
};

void Background::Wake(Task* task, Clock::duration pause) noexcept {
  Process& process = ProcessState<Process>();
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    if (task->pid_ != getpid()) {
      task->pid_ = getpid();
      task->state_ = Task::State::kIdle;
      task->ends_ = false;
    }
    if (task->state_ == Task::State::kRunning) task->woken_ = true;
    if (task->state_ != Task::State::kIdle) return;
    process.Add(task, pause);
    if (process.waiting == 0) Start(&process);
  }
  process.changed.notify_one();
}

void Background::Start(Process* process) {
  const size_t most = std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 1, kMostThreads);
  if (process->threads == most) return;
  try {
    std::thread([process] { Run(process); }).detach();
    ++process->threads;
  } catch (...) {
    // Others come to it, or the next Wake tries again.
  }
}

void Background::Run(Process* process) {
  std::unique_lock<std::mutex> lock(process->mutex);
  for (;;) {
    Task* const task = process->First();
    const auto now = Clock::now();
    if (task == nullptr || task->due_ > now) {
      ++process->waiting;
      const auto others = [process, task] { return process->First() != task; };
      if (task == nullptr) {
        process->changed.wait(lock, others);
      } else {
        (void)process->changed.wait_for(lock, task->due_ - now, others);
      }
      --process->waiting;
      continue;
    }
    process->Take(task);
    task->state_ = Task::State::kRunning;
    task->woken_ = false;
    lock.unlock();
    const Clock::duration pause = task->Work();
    lock.lock();
    task->state_ = Task::State::kIdle;
    if (!task->ends_ && (pause >= Clock::duration::zero() || task->woken_)) {
      process->Add(task, std::max(pause, Clock::duration::zero()));
    }
    process->ended.notify_all();
  }
}

void Background::Remove(Task* task) noexcept {
  Process& process = ProcessState<Process>();
  std::unique_lock<std::mutex> lock(process.mutex);
  if (task->pid_ != getpid()) return;
  task->ends_ = true;
  process.ended.wait(lock, [task] { return task->state_ != Task::State::kRunning; });
  task->ends_ = false;
  if (task->state_ == Task::State::kDue) process.Take(task);
  task->state_ = Task::State::kIdle;
}

}  // namespace dynemb
