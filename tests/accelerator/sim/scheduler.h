// Streams as queues of work, and the adversary that decides when each piece of it runs.
//
// Nothing runs by itself: a queued operation waits until a host wait forces it, or until the
// adversary feels like it. Both are legal on a real device, and both are rare there. There are no
// threads: whoever waits runs what it waits for, so a seed and a program give the same order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sim {

struct Queue;

// A place in a stream. Done once everything before it has run.
struct Mark {
  Queue* queue;
  bool done = false;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Operation {
  std::string name;
  std::function<void()> run;
  MarkPtr waits_for;  // may not run before that is done
  MarkPtr reached;    // done when this has run
};

struct Queue {
  int device;
  int64_t stream;
  std::deque<Operation> waiting;
};

class Scheduler {
 public:
  // Also guards memory: one lock, so that no order of two can deadlock.
  std::recursive_mutex lock;

  // Choose the adversary: how much it runs ahead of any wait, and beside what a wait asks for.
  void seed(uint64_t value);
  void push(int device, int64_t stream, std::string name, std::function<void()> run);
  MarkPtr record(int device, int64_t stream);
  void wait(int device, int64_t stream, MarkPtr mark);
  // The host waits. Throws what failed on the device since the last wait, once.
  void finish(const MarkPtr& mark, const std::string& why);
  void finish_device(int device, const std::string& why);
  // Ask without waiting. The adversary may take it as an occasion.
  bool is_done(const MarkPtr& mark);
  bool is_empty(int device, int64_t stream);

  // Make the next operation whose name contains the text fail, as a device would.
  void fail_next(std::string name);

  std::map<std::string, uint64_t> host_waits;  // by what for
  std::map<std::string, uint64_t> executed;    // by operation

 private:
  Queue& queue(int device, int64_t stream);
  bool is_ready(const Queue& queue) const;
  bool chance(double probability);
  void run_head(Queue& queue);
  void run_towards(Queue& queue);
  bool run_any();
  void stray();
  void raise_error();

  std::map<std::pair<int, int64_t>, Queue> queues_;
  std::mt19937_64 random_{0};
  double early_ = 0;   // probability to run something as soon as anything is queued
  double beside_ = 0;  // probability to run something else during a wait
  bool dawdles_ = false;  // whether a wait for an event lets other threads go on first
  std::string failing_, error_;
};

Scheduler& scheduler();

}  // namespace sim
