// What c10d's headers need of <ATen/ATen.h>, which has all operators and takes the compiler half of its time. It is found
// before torch's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
