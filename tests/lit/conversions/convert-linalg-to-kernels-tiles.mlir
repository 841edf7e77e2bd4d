// RUN: retrograd-opt %s -p 'convert-linalg-to-kernels{ptx=none families=transposes tiles="transposes 1 of 2048x9 f32 to f32:1024 2 warps"}' \
// RUN:   --allow-unregistered-dialect | FileCheck %s --check-prefix=TILES
// RUN: retrograd-opt %s -p 'convert-linalg-to-kernels{ptx=none families=transposes ask=true}' --allow-unregistered-dialect \
// RUN:   | FileCheck %s --check-prefix=ASK
// RUN: not retrograd-opt %s -p 'convert-linalg-to-kernels{ptx=none families=transposes tiles="transposes 1 of 2048x9 f32 to f32:3 warps"}' \
// RUN:   2>&1 | FileCheck %s --check-prefix=NONE
// RUN: not retrograd-opt %s -p 'convert-linalg-to-kernels{ptx=none families=transposes tiles=1024}' 2>&1 | FileCheck %s --check-prefix=FORM

// Tiles that were measured are those of the kernel that they are for, and of no other.

// TILES: bwd.kernels = ["transposes of 1 x 2048 x 9: transpose_f32_f32_64x16x2_rows_x16_y16, tiles by measurement", "transposes of 1 x 9 x 2048: transpose_f32_f32_16x128x4_columns_x16_y16"]
// TILES: @transpose_f32_f32_64x16x2_rows_x16_y16{{.*}} -> tensor<9x2048xf32>

// What could be measured is noted, with what to run.

// ASK: bwd.questions = [{{.*}}transposes 1 of 2048x9 f32 to f32{{.*}}2048 4 warps{{.*}}4096 8 warps{{.*}}transposes 1 of 9x2048

// NONE: 'linalg.transpose' op: the tiles '3 warps' are none of those for 'transposes 1 of 2048x9 f32 to f32': 2048 4 warps, {{.*}}; measure anew, or leave out the option tiles
// FORM: convert-linalg-to-kernels: option tiles: expected QUESTION:TILES;QUESTION:TILES, found '1024'; or leave it out

func.func @turned(%x: tensor<2048x9xf32>, %y: tensor<9x2048xf32>) -> (tensor<9x2048xf32>, tensor<2048x9xf32>) {
  %e = tensor.empty() : tensor<9x2048xf32>
  %t = linalg.transpose ins(%x : tensor<2048x9xf32>) outs(%e : tensor<9x2048xf32>) permutation = [1, 0]
  %f = tensor.empty() : tensor<2048x9xf32>
  %u = linalg.transpose ins(%y : tensor<9x2048xf32>) outs(%f : tensor<2048x9xf32>) permutation = [1, 0]
  return %t, %u : tensor<9x2048xf32>, tensor<2048x9xf32>
}
