// SPDX-License-Identifier: Apache-2.0
// Products of unsigned bytes and int8 weights, of matrices and of the windows of images.
#pragma once

#include "finish.h"
#include "threads.h"
#include "windows.h"

namespace qompose_x86 {

constexpr int WIDEST = 4;                  // vectors of channels that a tile has
constexpr int64_t PANEL = WIDEST * LANES;  // channels whose weights lie together
// By width, the most rows of a tile: so many that sums fit in registers, of which AVX-512 has 32, AVX2 16.
constexpr int MOST_ROWS[] = {0, 12, LANES == 16 ? 12 : 6, LANES == 16 ? 8 : 4, LANES == 16 ? 6 : 3};
constexpr int MOST_SUMS = LANES == 16 ? 24 : 12;
constexpr int BATCH = 24;  // windows that are found, and whose sums are finished, together: whole tiles

// Which quad of a run each lane takes, for the quads of a result: of groups whose results are one vector.
struct Picks {
  alignas(4 * LANES) int32_t lanes[LANES / 4][LANES];

  // `depth`: of a group, whose results are as many; 0 if there are no such groups.
  explicit Picks(int64_t depth) {
    const int64_t quads = depth / 4;
    for (int quad = 0; quad < quads; ++quad)
      for (int lane = 0; lane < LANES; ++lane)
        lanes[quad][lane] = static_cast<int32_t>(lane / depth * quads + quad);
  }
};

// The bytes that windows read: of window r in run i those of where[i * stride + r] + offset.
struct Runs {
  const Bytes* where;
  int64_t stride, count, quads;
  int64_t offset = 0;
  const Picks* picks = nullptr;  // null: all lanes take the same quads
};

// Sums of ROWS windows, for WIDTH vectors of channels. Weights: [run][quad][channel][4].
template <int WIDTH, int ROWS>
QOMPOSE_INLINE void sum_windows(const Runs& runs, const int8_t* weights, const int32_t* start,
                                Ints (&acc)[ROWS][WIDTH]) {
  const int64_t quads = runs.quads, offset = runs.offset;
  const Bytes* where = runs.where;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) acc[r][j] = load_ints(start + LANES * j);
  for (int64_t run = 0; run < runs.count; ++run, where += runs.stride) {
    Bytes from[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) from[r] = where[r] + offset;
    for (int64_t quad = 0; quad < quads; ++quad, weights += 4 * LANES * WIDTH) {
      Ints w[WIDTH];
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) w[j] = load_ints(weights + 4 * LANES * j);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        int32_t four;
        std::memcpy(&four, from[r] + 4 * quad, 4);
        const Ints x = ints(four);
#pragma GCC unroll 16
        for (int j = 0; j < WIDTH; ++j) acc[r][j] = dot(acc[r][j], x, w[j]);
      }
    }
  }
}

// The same of groups that have QUADS of the bytes of a run each, and one vector of channels together.
template <int QUADS, int ROWS>
QOMPOSE_INLINE void sum_groups(const Runs& runs, const int8_t* weights, const int32_t* start,
                               Ints (&acc)[ROWS][1]) {
  const Picks& picks = *runs.picks;
  const int64_t offset = runs.offset;
  const Bytes* where = runs.where;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) acc[r][0] = load_ints(start);
  for (int64_t run = 0; run < runs.count; ++run, where += runs.stride, weights += 4 * LANES * QUADS)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Ints x = repeated(where[r] + offset);
#pragma GCC unroll 4
      for (int quad = 0; quad < QUADS; ++quad)
        acc[r][0] =
            dot(acc[r][0], permuted(x, load_ints(picks.lanes[quad])), load_ints(weights + 4 * LANES * quad));
    }
}

template <int WIDTH, int ROWS>
QOMPOSE_INLINE void sum_runs(const Runs& runs, const int8_t* weights, const int32_t* start,
                             Ints (&acc)[ROWS][WIDTH]) {
  if constexpr (WIDTH == 1) {
    if (runs.picks && runs.quads == 1) return sum_groups<1>(runs, weights, start, acc);
    if (runs.picks) return sum_groups<2>(runs, weights, start, acc);
  }
  sum_windows(runs, weights, start, acc);
}

template <int WIDTH, int ROWS>
struct SumTile {
  static void run(const Runs& runs, const int8_t* weights, const int32_t* start, Ints* sums) {
    Ints acc[ROWS][WIDTH];
    sum_runs(runs, weights, start, acc);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < WIDTH; ++j) store_ints(sums + r * WIDTH + j, acc[r][j]);
  }
};

// For GCC this is another value from here on: had it to lie in memory at the end, it would in a loop before.
// Not written where it is used, in a lambda: clang does not capture the operands of asm.
QOMPOSE_INLINE void in_a_register(Ints& sum) { asm volatile("" : "+v"(sum)); }

// A tile of most rows, of four whole vectors of channels, two or one, whose sums are finished while they are
// in registers.
template <Function F, bool ADD, bool INTEGERS, int WIDTH>
void whole_tile(const Runs& runs, const int8_t* weights, const Finish& shared, int64_t row, int64_t channel,
                void* out) {
  const Finish f = shared;  // a copy that writing to `out` cannot change
  if (f.prefetch) fetch_places<ADD, INTEGERS, MOST_ROWS[WIDTH], WIDTH>(f, row, channel, out);
  Ints sums[MOST_ROWS[WIDTH]][WIDTH];
  sum_runs(runs, weights, f.start + channel, sums);
  unrolled<MOST_ROWS[WIDTH]>([&](auto r) QOMPOSE_INLINED {
    unrolled<WIDTH>([&](auto j) QOMPOSE_INLINED { in_a_register(sums[r][j]); });
  });
  finish_sums<F, ADD, INTEGERS>(f, sums, row, channel, out);
}

using WholeTile = void (*)(const Runs&, const int8_t*, const Finish&, int64_t, int64_t, void*);

// What finishes products.
struct Ending {
  WholeTile four, two, one;
  void (*tile)(const Finish&, const Ints*, int, int, int64_t, int64_t, void*);

  // Of tiles of so many vectors, for `left` channels; null if there is none.
  WholeTile whole(int width, int64_t left) const {
    return width == 1 ? one : width == 2 ? two : width == 4 && left >= PANEL ? four : nullptr;
  }
};

template <Function F, bool ADD, bool INTEGERS>
constexpr Ending ENDING = {whole_tile<F, ADD, INTEGERS, 4>, whole_tile<F, ADD, INTEGERS, 2>,
                           whole_tile<F, ADD, INTEGERS, 1>, finish_tile<F, ADD, INTEGERS>};

inline Ending ending_of(const Finish& f) {
  const bool add = f.other != nullptr, integers = f.kind != FLOAT32;
  return with_function<Ending>(f.function, [=](auto function) {
    constexpr Function F = function;
    if (add) return integers ? ENDING<F, true, true> : ENDING<F, true, false>;
    return integers ? ENDING<F, false, true> : ENDING<F, false, false>;
  });
}

// The tile of a width and a number of rows: `Tile<WIDTH, ROWS>::run`.
template <template <int, int> class Tile, int WIDTH, int ROWS = MOST_ROWS[WIDTH]>
auto tile_of(int rows) {
  if constexpr (ROWS == 1)
    return &Tile<WIDTH, 1>::run;
  else
    return rows == ROWS ? &Tile<WIDTH, ROWS>::run : tile_of<Tile, WIDTH, ROWS - 1>(rows);
}

template <template <int, int> class Tile>
auto tile_of(int width, int rows) {
  switch (width) {
    case 1:
      return tile_of<Tile, 1>(rows);
    case 2:
      return tile_of<Tile, 2>(rows);
    case 3:
      return tile_of<Tile, 3>(rows);
    default:
      return tile_of<Tile, 4>(rows);
  }
}

// What there is to do, as batches in an order that keeps what they read and write in the cache of a core:
// blocks of windows that read so many bytes, in each all panels of channels, the last with the channels that
// are left. Each thread gets windows of its own, or if weights are more than all windows read and write,
// panels.
constexpr int64_t BLOCK_BYTES = 192 << 10;

struct Plan {
  int64_t pixels, block, panels, units;
  int last_width, threads;

  Plan(const Image& g, const Finish& f, int available) : pixels(g.pixels()) {
    const int64_t channels = f.channels;
    const int64_t vectors = (channels + LANES - 1) / LANES;
    panels = (vectors + WIDEST - 1) / WIDEST;
    last_width = static_cast<int>(vectors - (panels - 1) * WIDEST);
    const int64_t bytes_each = std::max<int64_t>(1, g.n * g.h * g.w * g.c / pixels);
    block = std::max<int64_t>(1, BLOCK_BYTES / bytes_each / BATCH) * BATCH;
    const int64_t weights_each = g.runs() * g.quads() * 4;                         // bytes, of a channel
    units = (pixels + BATCH - 1) / BATCH * (g.group_depth ? g.groups() : panels);  // blocks are whole batches
    threads = threads_for(pixels * channels * weights_each, units, available);
    if (channels * weights_each <= pixels * (bytes_each + channels * size_of(f.kind)))
      block = std::min(block, (pixels + threads * BATCH - 1) / (threads * BATCH) * BATCH);
  }
  int width(int64_t panel) const { return panel + 1 == panels ? last_width : WIDEST; }
};

// Sums of one batch after another, with memory of its own.
class Worker {
 public:
  Worker(const Image& image, const Picks& picks, const int8_t* weights, const Finish& f, void* out)
      : g(image),
        weights(weights),
        f(f),
        out(out),
        ending(ending_of(f)),
        windows(g, BATCH),
        where(BATCH * g.runs()),
        reads{nullptr, 0, g.runs(), g.quads(), 0, g.own_depth ? &picks : nullptr} {}

  // Batches `from` to `to` of all of a plan.
  void work(const Plan& plan, int64_t from, int64_t to) noexcept {
    int64_t before = 0;
    for (int64_t first = 0; first < plan.pixels && before < to; first += plan.block) {
      const int64_t stop = std::min(first + plan.block, plan.pixels),
                    count = (stop - first + BATCH - 1) / BATCH;
      for (int64_t panel = 0; panel < plan.panels && before < to; ++panel, before += count)
        for (int64_t i = std::max<int64_t>(0, from - before); i < std::min(count, to - before); ++i) {
          find(first + i * BATCH, stop);
          sum(panel * PANEL, plan.width(panel));
        }
    }
  }

  // Batches `from` to `to` of all groups: windows, and for them one group after the other.
  void work_in_groups(int64_t channels_each, int64_t from, int64_t to) noexcept {
    const int64_t groups = g.groups();
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t group = unit % groups;
      if (unit == from || group == 0) find(unit / groups * BATCH, g.pixels());
      reads.offset = group * g.group_depth;
      const int64_t stop = std::min((group + 1) * channels_each, f.channels);
      for (int64_t channel = group * channels_each; channel < stop; channel += PANEL)
        sum(channel, static_cast<int>(std::min<int64_t>(WIDEST, (stop - channel + LANES - 1) / LANES)));
    }
  }

 private:
  // A batch from number `pixel` on, of those before `stop`.
  void find(int64_t pixel, int64_t stop) {
    row = pixel;
    rows = static_cast<int>(std::min<int64_t>(BATCH, stop - pixel));
    windows.find(row, rows, where.data());
    reads.stride = rows;
  }

  void sum(int64_t channel, int width) {
    const int8_t* panel = weights + channel * reads.count * reads.quads * 4;
    const int most = MOST_ROWS[width];
    int r = 0;
    reads.where = where.data();
    if (const WholeTile whole = ending.whole(width, f.channels - channel))
      for (; rows - r >= most; r += most, reads.where += most) whole(reads, panel, f, row + r, channel, out);
    if (r == rows) return;
    const int first = r;
    for (; r < rows; r += most, reads.where += most)
      tile_of<SumTile>(width, std::min(most, rows - r))(reads, panel, f.start + channel,
                                                        sums + (r - first) * width);
    ending.tile(f, sums, rows - first, width, row + first, channel, out);
  }

  const Image& g;
  const int8_t* weights;
  const Finish& f;
  void* out;
  const Ending ending;
  Windows windows;
  std::vector<Bytes> where;
  Runs reads;
  int64_t row = 0;
  int rows = 0;
  alignas(64) Ints sums[BATCH * WIDEST];
};

// `group_channels`: of the result, of each group, in whole vectors.
inline void product(const Image& g, const int8_t* weights, const Finish& f, int64_t group_channels, void* out,
                    int available) {
  const Plan plan(g, f, available);
  const Picks picks(g.own_depth);
  std::vector<Worker> workers;
  workers.reserve(plan.threads);
  for (int each = 0; each < plan.threads; ++each) workers.emplace_back(g, picks, weights, f, out);
  in_parallel(plan.threads, plan.units, [&](int thread, int64_t from, int64_t to) {
    if (g.group_depth)
      workers[thread].work_in_groups(group_channels, from, to);
    else
      workers[thread].work(plan, from, to);
  });
}

}  // namespace qompose_x86
