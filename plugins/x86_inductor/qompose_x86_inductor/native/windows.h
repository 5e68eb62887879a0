// SPDX-License-Identifier: Apache-2.0
// Where the windows of a convolution lie in an image (N, H, W, C) of unsigned bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace qompose_x86 {

using Bytes = const uint8_t*;

struct Image {
  Bytes x;
  int64_t n, h, w, c;  // of x
  int64_t oh, ow;      // of the result
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;
  int x_zp;
  int64_t group_depth;  // channels of x in a group, a multiple of 4; the last may lack some. 0: one group
  int64_t own_depth;    // of which so many are for a result, a multiple of 4. 0: all of them

  int64_t pixels() const { return n * oh * ow; }
  int64_t groups() const { return group_depth ? (c + group_depth - 1) / group_depth : 1; }
  // Columns of a window without gaps lie side by side: one run of bytes for each line of it.
  bool joined() const { return kw == 1 || (dw == 1 && !group_depth); }
  int64_t runs() const { return joined() ? kh : kh * kw; }
  int64_t run_bytes() const { return joined() ? kw * c : c; }
  // That a result is the sum of.
  int64_t quads() const {
    return ((own_depth ? own_depth : group_depth ? group_depth : run_bytes()) + 3) / 4;
  }
  // What is read of a run, for all groups.
  int64_t read_bytes() const { return group_depth ? groups() * group_depth : quads() * 4; }
  bool plain() const { return kh * kw * sh * sw == 1 && ph + pw == 0 && c == read_bytes(); }
};

// Runs of bytes that windows read. What is not in the image, or ends beside its last byte, is copied.
class Windows {
 public:
  Windows(const Image& image, int most_rows)
      : g(image),
        end(g.x + g.n * g.h * g.w * g.c),
        padded(g.read_bytes()),
        blank(padded, g.x_zp),
        copies(g.plain() ? 0 : most_rows * g.runs() * padded) {
    for (int64_t i = 0; i < g.kh; ++i)
      for (int64_t j = 0; j < (g.joined() ? 1 : g.kw); ++j)
        offsets.push_back((i * g.dh * g.w + j * g.dw) * g.c);
  }

  // Fill where[run][row] for `rows` windows from number `pixel` on.
  void find(int64_t pixel, int rows, Bytes* where) {
    if (g.plain()) {
      for (int r = 0; r < rows; ++r) where[r] = g.x + (pixel + r) * g.c;
      return;
    }
    int64_t column = pixel % g.ow, line = pixel / g.ow % g.oh, image = pixel / g.ow / g.oh;
    for (int r = 0; r < rows;) {
      const int stop = static_cast<int>(std::min<int64_t>(rows, r + g.ow - column));
      in_line(image, line * g.sh - g.ph, column * g.sw - g.pw, r, stop, rows, where);
      r = stop;
      column = 0;
      if (++line < g.oh) continue;
      line = 0;
      ++image;
    }
  }

 private:
  // Windows of one line: those that are in the image follow each other at one distance.
  void in_line(int64_t image, int64_t top, int64_t left, int r, int stop, int rows, Bytes* where) {
    const int64_t runs = static_cast<int64_t>(offsets.size()), last = g.w - 1 - (g.kw - 1) * g.dw;
    const bool inside = top >= 0 && top + (g.kh - 1) * g.dh < g.h;
    const Bytes latest = end - offsets.back() - padded;
    Bytes first = g.x + ((image * g.h + top) * g.w + left) * g.c;
    for (; r < stop; ++r, left += g.sw, first += g.sw * g.c) {
      if (!inside || left < 0 || left > last || first > latest) {
        one(image, top, left, r, rows, where);
        continue;
      }
      for (int64_t run = 0; run < runs; ++run) where[run * rows + r] = first + offsets[run];
    }
  }

  // A window that is not in the image, or ends beside its last byte.
  void one(int64_t image, int64_t top, int64_t left, int r, int rows, Bytes* where) {
    const int64_t runs = static_cast<int64_t>(offsets.size());
    const int64_t wide = g.joined() ? g.kw : 1, each = g.joined() ? 1 : g.kw;
    uint8_t* copy = &copies[r * runs * padded];
    for (int64_t run = 0; run < runs; ++run, copy += padded) {
      const int64_t y = top + run / each * g.dh;
      where[run * rows + r] =
          y < 0 || y >= g.h ? blank.data() : at_border(image, y, left + run % each * g.dw, wide, copy);
    }
  }

  Bytes at_border(int64_t image, int64_t y, int64_t from, int64_t wide, uint8_t* copy) {
    const int64_t before = std::max<int64_t>(0, -from), after = std::max<int64_t>(0, from + wide - g.w);
    if (before + after >= wide) return blank.data();
    const Bytes found = g.x + ((image * g.h + y) * g.w + from + before) * g.c;
    if (before + after == 0 && end - found >= padded) return found;
    if (before + after > 0) std::memset(copy, g.x_zp, wide * g.c);
    std::memcpy(copy + before * g.c, found, (wide - before - after) * g.c);
    return copy;
  }

  const Image& g;
  const Bytes end;
  const int64_t padded;
  std::vector<uint8_t> blank, copies;
  std::vector<int64_t> offsets;  // of runs, from the first byte of a window
};

}  // namespace qompose_x86
