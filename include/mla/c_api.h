/* SPDX-License-Identifier: Apache-2.0 */
/* This header offers the library to C and to bindings: the C++ API of mla.h behind opaque handles and plain structs, as
 * C11.
 *
 * - Every function that can fail returns an mla_code; on failure mla_last_error() tells what was wrong. `out`
 *   parameters have not been written then, nor have outputs if an argument was wrong.
 * - Tensors are pointers to mla_tensor, whose layout is that of DLPack's DLTensor: cast and pass one. A null pointer
 *   means "not given". Element types are DLPack's codes.
 * - Parameter structs begin with their size; fill them with their _init function first. Fields that later versions add
 *   are zero for older callers. What fields mean, and their shapes, is said in mla/params.h.
 * - Outputs have memory of their own; mla/params.h says how far that is checked.
 * - On a GPU, calls put kernels into the params' `stream` and return; mla/plan.h says what they check.
 * - A context may be used by several threads; its calls wait for one another. A plan may not be run on two contexts at
 *   once. No function throws, prints or ends the process. */
#ifndef MLA_C_API_H_
#define MLA_C_API_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mla_code {
  MLA_OK = 0,
  MLA_INVALID_ARGUMENT = 1,    /* a field is wrong; the message names it */
  MLA_UNSUPPORTED = 2,         /* no backend (or not the forced one) can run the problem */
  MLA_WORKSPACE_TOO_SMALL = 3, /* the message says how many bytes are needed */
  MLA_INTERNAL = 4             /* out of memory or out of threads, or a bug in the library */
} mla_code;

typedef enum mla_op {
  MLA_DECODE = 0,
  MLA_PREFILL = 1,
  MLA_MERGE_STATES = 2,
  MLA_APPEND = 3,
  MLA_GATHER = 4,
  MLA_DECODE_SPARSE = 5,
  MLA_PREFILL_SPARSE = 6,
  MLA_APPEND_ROPE = 7,
  MLA_COPY_PAGES = 8,
  MLA_BLOCK_TABLE_TO_CSR = 9,
  MLA_PHYSICAL_SLOTS = 10,
  MLA_APPEND_INDEXER = 11,
  MLA_INDEXER_LOGITS = 12,
  MLA_TOP_K = 13,
  MLA_INDEXER_TOP_K = 14,
  MLA_COMPRESS = 15,
  MLA_FINISH_OUTPUT = 16
} mla_op;

/* Lists the values for the `format` of a cache. */
typedef enum mla_cache_format {
  MLA_CACHE_BF16 = 0,
  MLA_CACHE_F16 = 1,
  MLA_CACHE_FP8 = 2,
  MLA_CACHE_FP8_DS_MLA = 3,
  MLA_CACHE_FP8_DSV4 = 4,
  MLA_CACHE_FP8_DSV41 = 5,
  MLA_CACHE_FP4_DSV41 = 6,
  MLA_CACHE_FP8_NOPE = 7,
  MLA_CACHE_NVFP4_DS_MLA = 8,
  MLA_CACHE_NVFP4_DS_MLA_416 = 9,
  MLA_CACHE_NVFP4_DS_MLA_368 = 10,
  MLA_CACHE_NVFP4_DSV4 = 11,
  MLA_CACHE_MXFP4_DSV4 = 12
} mla_cache_format;

/* Lists the values for the `format` of the indexer's cache. */
typedef enum mla_indexer_format { MLA_INDEXER_FP8 = 0, MLA_INDEXER_MXFP4 = 1 } mla_indexer_format;

/* Lists the values for `lse_base`. */
typedef enum mla_lse_base { MLA_LSE_BASE_E = 0, MLA_LSE_BASE_2 = 1 } mla_lse_base;

/* Lists the values for `compute`, which AttentionOptions of mla/params.h explains. */
typedef enum mla_compute { MLA_COMPUTE_DEFAULT = 0, MLA_COMPUTE_FP8 = 1, MLA_COMPUTE_EXACT = 2 } mla_compute;

/* Lists the values for `topk_length_per`, which says whom an entry of topk_length is for. */
typedef enum mla_length_per {
  MLA_LENGTH_BY_SHAPE = 0,   /* as its shape says; refused where it says neither: T = B > 1, with qo_indptr */
  MLA_LENGTH_PER_TOKEN = 1,  /* [T] */
  MLA_LENGTH_PER_REQUEST = 2 /* [B] */
} mla_length_per;

/* Lists the element type codes that the library knows, with the bits they come in (DLPack's DLDataTypeCode). */
typedef enum mla_dtype_code {
  MLA_DTYPE_INT = 0,    /* 32, 64 */
  MLA_DTYPE_UINT = 1,   /* 8 */
  MLA_DTYPE_FLOAT = 2,  /* 16, 32 */
  MLA_DTYPE_BFLOAT = 4, /* 16 */
  MLA_DTYPE_E4M3FN = 10 /* 8 */
} mla_dtype_code;

/* Lists the values for `device_type` (DLPack's DLDeviceType). */
typedef enum mla_device_type { MLA_DEVICE_CPU = 1, MLA_DEVICE_CUDA = 2 } mla_device_type;

typedef struct mla_device {
  int32_t device_type;
  int32_t device_id;
} mla_device;

typedef struct mla_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* 1 */
} mla_dtype;

/* Describes a strided tensor; it is byte for byte DLPack's DLTensor. */
typedef struct mla_tensor {
  void* data;
  mla_device device;
  int32_t ndim;
  mla_dtype dtype;
  int64_t* shape;
  int64_t* strides;     /* in elements; null = row-major */
  uint64_t byte_offset; /* of the first element from `data` */
} mla_tensor;

typedef struct mla_context mla_context;
typedef struct mla_plan mla_plan;

typedef struct mla_context_options {
  size_t struct_size;
  int32_t num_threads;     /* the calling thread among them; 0 = num_affinity, else as many as the process may use */
  int32_t num_affinity;    /* 0 = not pinned, else num_threads */
  const int32_t* affinity; /* processor that each worker is pinned to; entry 0 is ignored */
  const char* backend;     /* a row or family to force; null = the environment's MLA_BACKEND, else the best */
  const char* device;      /* "cpu", "cuda:1", "emulated:sm120"; null = MLA_EMULATE, else where the tensors are */
} mla_context_options;

/* Describes a latent cache, by either `kv` or, in bf16, f16 and fp8, `ckv` and `kpe`. An mla_cache_scales beside it in
 * the same struct belongs to it. */
typedef struct mla_kv_cache {
  int32_t format;        /* mla_cache_format */
  int32_t page_size;     /* fp8_dsv4, fp8_dsv41, fp4_dsv41, nvfp4_dsv4: tokens of a page; else 0 */
  const mla_tensor* kv;  /* [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; fp8_dsv4, fp8_dsv41, fp4_dsv41,
                            nvfp4_dsv4: uint8 [num_pages, page bytes or more]; fp8_ds_mla: uint8 [num_pages, page_size,
                            656], fp8_nope: 528, nvfp4_ds_mla: 432, 416 or 368, mxfp4_dsv4: 368 */
  const mla_tensor* ckv; /* [num_pages, page_size, kv_lora_rank] */
  const mla_tensor* kpe; /* [num_pages, page_size, qk_rope_head_dim] */
} mla_kv_cache;

typedef struct mla_cache_scales {
  const mla_tensor* ckv_scale; /* fp8: [1] f32, or [num_pages, page_size, 4] f32; nvfp4_ds_mla: [1] f32, null = 1 */
  const mla_tensor* kpe_scale; /* fp8: [1] f32; null = that of ckv */
  int32_t any_scales;          /* scales are powers of two if 0, any numbers if 1: what writers choose */
  int32_t reserved;            /* 0 */
} mla_cache_scales;

/* Says which pages hold which tokens, by either `block_table` or `kv_indptr` and `kv_indices`. */
typedef struct mla_page_table {
  const mla_tensor* kv_indptr;   /* [B+1] int32 */
  const mla_tensor* kv_indices;  /* [kv_indptr[B]] or more, int32 */
  const mla_tensor* block_table; /* [B, max_pages] int32 */
  const mla_tensor* kv_len;      /* [B] int32 */
} mla_page_table;

/* Holds the options that attention operations have in common; all fields zero means no option. */
typedef struct mla_attention_options {
  const mla_tensor* attn_sink;    /* [H] f32 */
  const mla_tensor* alibi_slopes; /* [H] f32 */
  float logits_soft_cap;
  int32_t has_window;  /* 1: window_left counts */
  int32_t window_left; /* keys that a query sees before its own */
  int32_t compute;     /* mla_compute; fp8 over quantized caches, and in prefill of e4m3 tensors */
} mla_attention_options;

/* Describes this rank's share of every request; all fields zero means the whole request. */
typedef struct mla_context_parallel {
  int32_t rank;
  int32_t world;      /* 0 = 1 */
  int32_t interleave; /* 0 = 1 */
  int32_t reserved;   /* 0 */
} mla_context_parallel;

typedef struct mla_decode_params {
  size_t struct_size;
  const mla_tensor* q;      /* [T, H, d_qk]; or */
  const mla_tensor* q_nope; /* [T, H, kv_lora_rank] and */
  const mla_tensor* q_pe;   /* [T, H, qk_rope_head_dim] */
  mla_kv_cache cache;
  mla_page_table pages;
  const mla_tensor* qo_indptr; /* [B+1] int32; null = T / B queries each */
  int32_t causal;
  float sm_scale;
  int32_t lse_base; /* mla_lse_base */
  int32_t batch_invariant;
  const mla_tensor* o;       /* out [T, H, d_v] */
  const mla_tensor* lse;     /* out [T, H] f32, optional */
  const mla_tensor* q_scale; /* [1] f32, with e4m3 queries */
  mla_cache_scales scales;
  const mla_tensor* tree_mask;    /* uint8 [T, q_len_max or more]; or */
  const mla_tensor* tree_parents; /* [T] int32 */
  mla_attention_options options;
  mla_context_parallel context_parallel;
  const mla_tensor* o_scale;    /* [1] f32, with e4m3 outputs */
  void* stream;                 /* cudaStream_t; null = the default stream. Ignored on the CPU */
  int32_t shared_prefix;        /* 1: rows that neighbouring requests share are read once; see mla/params.h */
  int32_t lse_inf_without_keys; /* lse of a query that sees no key: -inf if 0, +inf if 1 */
} mla_decode_params;

/* Describes one pool of latent rows, and names the rows that each query attends to. */
typedef struct mla_sparse_pool {
  mla_kv_cache cache;
  mla_cache_scales scales;
  const mla_tensor* indices;     /* [T, topk] int32, physical slots */
  const mla_tensor* topk_length; /* [T] or [B] int32, optional */
} mla_sparse_pool;

typedef struct mla_decode_sparse_params {
  size_t struct_size;
  const mla_tensor* q;       /* [T, H, d_qk]; or */
  const mla_tensor* q_nope;  /* [T, H, kv_lora_rank] and */
  const mla_tensor* q_pe;    /* [T, H, qk_rope_head_dim] */
  const mla_tensor* q_scale; /* [1] f32, with e4m3 queries */
  mla_sparse_pool pool;
  mla_sparse_pool extra_pool;  /* optional: all null */
  const mla_tensor* qo_indptr; /* [B+1] int32, only with a topk_length per request; null = T / B queries each */
  mla_attention_options options;
  float sm_scale;
  int32_t lse_base; /* mla_lse_base */
  int32_t batch_invariant;
  int32_t lse_inf_without_keys;  /* lse of a query that sees no key: -inf if 0, +inf if 1 */
  const mla_tensor* o;           /* out [T, H, d_v] */
  const mla_tensor* o_scale;     /* [1] f32, with e4m3 outputs */
  const mla_tensor* lse;         /* out [T, H] f32, optional */
  void* stream;                  /* cudaStream_t; null = the default stream. Ignored on the CPU */
  int32_t topk_length_per;       /* mla_length_per, of pool */
  int32_t extra_topk_length_per; /* the same, of extra_pool */
  const mla_tensor* max_logits;  /* out [T, H] f32, optional */
  /* What becomes of outputs before they are stored, as in mla_finish_output_params; all null = nothing, unless o is
     [T, G, H / G, d_v]. */
  const mla_tensor* cos_sin;   /* [max_positions, rotary channels] f32, optional */
  const mla_tensor* positions; /* [T] int64, with cos_sin */
  const mla_tensor* gate;      /* [T, H, d_v] or [T, H, 1], optional */
  const mla_tensor* scale;     /* out, with an e4m3 o instead of o_scale; f32, uint8 or int32 */
  int32_t interleaved;         /* 1 after _init */
  int32_t any_scales;          /* powers of two if 0, any numbers if 1 */
} mla_decode_sparse_params;

typedef struct mla_prefill_params {
  size_t struct_size;
  const mla_tensor* q;         /* [T, H, d_qk] */
  const mla_tensor* k;         /* [S, H, d_qk] */
  const mla_tensor* v;         /* [S, H, d_v] */
  const mla_tensor* qo_indptr; /* [B+1] int32 */
  const mla_tensor* kv_indptr; /* [B+1] int32 */
  int32_t causal;
  float sm_scale;
  int32_t lse_base; /* mla_lse_base */
  int32_t batch_invariant;
  const mla_tensor* o;   /* out [T, H, d_v] */
  const mla_tensor* lse; /* out [T, H] f32, optional */
  mla_attention_options options;
  void* stream;              /* cudaStream_t; null = the default stream. Ignored on the CPU */
  const mla_tensor* q_scale; /* [1] f32, with e4m3 q, k and v */
  const mla_tensor* k_scale; /* [1] f32, with e4m3 q, k and v */
  const mla_tensor* v_scale; /* [1] f32, with e4m3 q, k and v */
  const mla_tensor* o_scale; /* [1] f32, with e4m3 outputs */
} mla_prefill_params;

typedef struct mla_prefill_sparse_params {
  size_t struct_size;
  const mla_tensor* q;           /* [T, H, d_qk] */
  const mla_tensor* kv;          /* [S, d_qk] */
  const mla_tensor* indices;     /* [T, topk] int32, rows of kv */
  const mla_tensor* topk_length; /* [T] int32, optional */
  mla_attention_options options;
  float sm_scale;
  int32_t lse_base; /* mla_lse_base */
  int32_t batch_invariant;
  int32_t lse_inf_without_keys; /* lse of a query that sees no key: -inf if 0, +inf if 1 */
  const mla_tensor* o;          /* out [T, H, d_v] */
  const mla_tensor* max_logits; /* out [T, H] f32, optional */
  const mla_tensor* lse;        /* out [T, H] f32, optional */
  void* stream;                 /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_prefill_sparse_params;

typedef struct mla_merge_states_params {
  size_t struct_size;
  const mla_tensor* partial_o;   /* [N, T, H, d_v] */
  const mla_tensor* partial_lse; /* [N, T, H] f32 */
  int32_t lse_base;              /* mla_lse_base */
  int32_t in_place;
  const mla_tensor* o;   /* out [T, H, d_v] */
  const mla_tensor* lse; /* out [T, H] f32, optional unless in_place */
  void* stream;          /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_merge_states_params;

typedef struct mla_append_params {
  size_t struct_size;
  const mla_tensor* kv;           /* [T, kv_lora_rank + qk_rope_head_dim]; or */
  const mla_tensor* ckv;          /* [T, kv_lora_rank] and */
  const mla_tensor* kpe;          /* [T, qk_rope_head_dim] */
  const mla_tensor* slot_mapping; /* [T] int64 */
  mla_kv_cache cache;             /* out */
  mla_cache_scales scales;        /* ckv_scale: out if it is not [1] */
  void* stream;                   /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_append_params;

typedef struct mla_append_rope_params {
  size_t struct_size;
  const mla_tensor* q_nope;        /* [T, H, kv_lora_rank]; null with q_pe and q_out: keys only */
  const mla_tensor* q_pe;          /* [T, H, qk_rope_head_dim] */
  const mla_tensor* q_out;         /* out [T, H, kv_lora_rank + qk_rope_head_dim] */
  const mla_tensor* q_scale;       /* [1] f32, with an e4m3 q_out */
  const mla_tensor* ckv;           /* [T, kv_lora_rank] */
  const mla_tensor* kpe;           /* [T, qk_rope_head_dim]; null with q_pe, cos_sin, positions: no rotary channels */
  const mla_tensor* cos_sin;       /* [max_positions, qk_rope_head_dim] f32 */
  const mla_tensor* positions;     /* [T] int64 */
  int32_t interleaved;             /* 1 after _init */
  int32_t reserved;                /* 0 */
  const mla_tensor* slot_mapping;  /* [T] int64 */
  mla_kv_cache cache;              /* out */
  mla_cache_scales scales;         /* as in append */
  void* stream;                    /* cudaStream_t; null = the default stream. Ignored on the CPU */
  const mla_tensor* q_norm_weight; /* [kv_lora_rank + qk_rope_head_dim], optional, with q_norm */
  const mla_tensor* norm_weight;   /* [kv_lora_rank], or with the rotary channels; optional: keys are normalized */
  int32_t q_norm;                  /* queries are normalized */
  float norm_eps;                  /* 1e-6 after _init */
} mla_append_rope_params;

typedef struct mla_copy_pages_params {
  size_t struct_size;
  mla_kv_cache from;
  mla_cache_scales from_scales;
  const mla_tensor* from_pages; /* [N] int32 */
  mla_kv_cache to;              /* out */
  mla_cache_scales to_scales;   /* as in append */
  const mla_tensor* to_pages;   /* [M] int32, all different */
  void* stream;                 /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_copy_pages_params;

typedef struct mla_gather_params {
  size_t struct_size;
  mla_kv_cache cache;
  mla_page_table pages;
  const mla_tensor* token_start; /* [B] int32; null = 0 everywhere */
  const mla_tensor* out_indptr;  /* [B+1] int32 */
  const mla_tensor* out_kv;      /* out [S, kv_lora_rank + qk_rope_head_dim]; or */
  const mla_tensor* out_ckv;     /* out [S, kv_lora_rank] and */
  const mla_tensor* out_kpe;     /* out [S, qk_rope_head_dim] */
  mla_cache_scales scales;
  void* stream; /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_gather_params;

typedef struct mla_block_table_to_csr_params {
  size_t struct_size;
  const mla_tensor* block_table; /* [B, max_pages] int32 */
  const mla_tensor* kv_len;      /* [B] int32 */
  int32_t page_size;
  int32_t reserved;             /* 0 */
  const mla_tensor* kv_indptr;  /* out [B+1] int32 */
  const mla_tensor* kv_indices; /* out int32, room for every page in use */
  void* stream;                 /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_block_table_to_csr_params;

typedef struct mla_physical_slots_params {
  size_t struct_size;
  const mla_tensor* indices;     /* [T, topk] int32 */
  const mla_tensor* topk_length; /* [T] int32, optional */
  const mla_tensor* qo_indptr;   /* [B+1] int32; null = T / B queries each */
  mla_page_table pages;
  int32_t page_size;
  int32_t compact;
  mla_context_parallel context_parallel;
  /* out [T, topk] int32; may be `indices`. With list_tokens [T, at least topk * ratio + ratio - 1] */
  const mla_tensor* slots;
  const mla_tensor* valid_count; /* out [T] int32, optional */
  void* stream;                  /* cudaStream_t; null = the default stream. Ignored on the CPU */
  int32_t ratio;                 /* tokens that an index stands for; 0 is 1 */
  int32_t list_tokens;           /* 1: all of them are listed; 0: `pages` is of a pool with a row for them */
} mla_physical_slots_params;

typedef struct mla_indexer_cache {
  const mla_tensor* kv; /* uint8 [num_pages, page_size * 132 or more], of mxfp4 page_size * 68 */
  int32_t page_size;
  int32_t format; /* mla_indexer_format */
} mla_indexer_cache;

typedef struct mla_append_indexer_params {
  size_t struct_size;
  const mla_tensor* k;            /* [T, 128] */
  const mla_tensor* slot_mapping; /* [T] int64 */
  int32_t any_scales;             /* powers of two if 0, any numbers if 1: not of mxfp4 */
  int32_t reserved;               /* 0 */
  mla_indexer_cache cache;        /* out */
  void* stream;                   /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_append_indexer_params;

typedef struct mla_indexer_logits_params {
  size_t struct_size;
  const mla_tensor* q;       /* [T, H, 128] */
  const mla_tensor* weights; /* [T, H] f32 */
  mla_indexer_cache cache;
  mla_page_table pages;
  const mla_tensor* qo_indptr; /* [B+1] int32; null = T / B queries each */
  int32_t causal;              /* 1 after _init */
  int32_t compute;             /* mla_compute; exact: sums of f32 everywhere, as params.h says */
  const mla_tensor* logits;    /* out [T, N] f32, bf16 or f16, N at least a request's keys, or M * block_size */
  void* stream;                /* cudaStream_t; null = the default stream. Ignored on the CPU */
  const mla_tensor* blocks;    /* [T, M] int32, optional: blocks of keys whose logits are computed */
  int32_t block_size;          /* keys of a block; 0 is 1 */
  int32_t ratio;               /* tokens that a key stands for, kv_len counts tokens; 0 is 1 */
  /* [T] int32, optional: query t sees keys [key_begin[t], key_end[t]). Without key_begin they begin with key 0, without
   * key_end `causal` says where they end. */
  const mla_tensor* key_begin;
  const mla_tensor* key_end;
} mla_indexer_logits_params;

typedef struct mla_top_k_params {
  size_t struct_size;
  const mla_tensor* logits;  /* [T, N] f32, bf16 or f16 */
  const mla_tensor* lengths; /* [T] int32, optional */
  const mla_tensor* indices; /* out [T, k] int32 */
  void* stream;              /* cudaStream_t; null = the default stream. Ignored on the CPU */
  const mla_tensor* blocks;  /* [T, M] int32, optional: as given to indexer_logits */
  int32_t block_size;        /* keys of a block; without `blocks`, above 1, blocks are chosen; 0 is 1 */
  int32_t reserved;          /* 0 */
  const mla_tensor* starts;  /* [T] int32, optional: logits before starts[t] do not count */
} mla_top_k_params;

/* Holds the parameters of indexer_top_k, which computes physical slots from the indexer's queries. */
typedef struct mla_indexer_top_k_params {
  size_t struct_size;
  const mla_tensor* q;       /* [T, H, 128] */
  const mla_tensor* weights; /* [T, H] f32 */
  mla_indexer_cache cache;
  mla_page_table indexer_pages;
  const mla_tensor* qo_indptr; /* [B+1] int32; null = T / B queries each */
  int32_t causal;              /* 1 after _init */
  int32_t page_size;           /* of the latent cache, as `pages` */
  mla_page_table pages;
  const mla_tensor* logits;      /* scratch [T, N] f32, bf16 or f16, as that of indexer_logits */
  const mla_tensor* slots;       /* out [T, topk] int32; with list_tokens as physical_slots' */
  const mla_tensor* valid_count; /* out [T] int32, optional */
  void* stream;                  /* cudaStream_t; null = the default stream. Ignored on the CPU */
  const mla_tensor* blocks;      /* [T, M] int32, optional: blocks of keys to choose from */
  int32_t block_size;            /* keys of a block; 0 is 1 */
  int32_t ratio;                 /* tokens that a key stands for, kv_len counts tokens; 0 is 1 */
  /* [T] int32, optional: query t sees keys [key_begin[t], key_end[t]). Without key_begin they begin with key 0, without
   * key_end `causal` says where they end. */
  const mla_tensor* key_begin;
  const mla_tensor* key_end;
  int32_t compute;     /* mla_compute; exact: sums of f32 everywhere, as params.h says */
  int32_t list_tokens; /* 1: all tokens of each key are listed, as physical_slots does */
  mla_context_parallel context_parallel;
  int32_t topk;     /* keys that are selected; 0: as many as a row of slots has room for */
  int32_t reserved; /* 0 */
} mla_indexer_top_k_params;

typedef struct mla_compress_params {
  size_t struct_size;
  const mla_tensor* kv;            /* [T, W]: W = D, or 2 D with overlap */
  const mla_tensor* score;         /* [T, W]; null if ratio is 1 */
  const mla_tensor* position_bias; /* [ratio, W] f32, optional */
  const mla_tensor* qo_indptr;     /* [B+1] int32; null = T / B tokens each */
  const mla_tensor* kv_len;        /* [B] int32, the new tokens included */
  const mla_tensor* state;         /* in and out [num_blocks, block_size, 2 W] f32; null if ratio is 1 */
  const mla_tensor* state_table;   /* [B, C] int32; null if ratio is 1 */
  const mla_tensor* norm_weight;   /* [D], optional */
  const mla_tensor* latent;        /* out [T, D] */
  const mla_tensor* slot_mapping;  /* [T] int64, with `cache` or `indexer` */
  const mla_tensor* cos_sin;       /* [max_positions, rotary channels] f32, optional */
  int32_t ratio;                   /* 1 after _init */
  int32_t overlap;
  int32_t interleaved; /* 1 after _init */
  int32_t any_scales;  /* of the indexer's keys: powers of two if 0, any numbers if 1: not of mxfp4 */
  float norm_eps;      /* 1e-6 after _init */
  int32_t reserved;    /* 0 */
  mla_kv_cache cache;  /* out, optional */
  mla_cache_scales scales;
  mla_indexer_cache indexer; /* out, optional */
  void* stream;              /* cudaStream_t; null = the default stream. Ignored on the CPU */
  /* What append_rope is to do in the same call, on the same stream, for the same tokens; null = nothing */
  const mla_append_rope_params* append;
} mla_compress_params;

typedef struct mla_finish_output_params {
  size_t struct_size;
  const mla_tensor* o;         /* [T, H, d_v] */
  const mla_tensor* cos_sin;   /* [max_positions, rotary channels] f32, optional */
  const mla_tensor* positions; /* [T] int64, with cos_sin */
  const mla_tensor* gate;      /* [T, H, d_v] or [T, H, 1], optional */
  const mla_tensor* out;       /* out [T, H, d_v] or [T, G, H / G, d_v] */
  const mla_tensor* scale;     /* out, with an e4m3 `out`; f32, uint8 or int32 */
  int32_t interleaved;         /* 1 after _init */
  int32_t any_scales;          /* powers of two if 0, any numbers if 1 */
  void* stream;                /* cudaStream_t; null = the default stream. Ignored on the CPU */
} mla_finish_output_params;

/* Holds what decides which backend can run an operation. */
typedef struct mla_problem {
  size_t struct_size;
  int32_t op; /* mla_op */
  mla_device device;
  mla_dtype q_dtype;
  int32_t cache_format; /* mla_cache_format */
  int64_t num_heads;
  int64_t d_qk;
  int64_t d_v;
  int32_t gpu_arch;       /* 80 for sm80, on this machine or not; 0 = that of `device` */
  int32_t emulated;       /* the GPU is an emulated one */
  int64_t q_len;          /* decode: query tokens of a request, rounded up; 1 with batch_invariant; 0 = 1 */
  int32_t compute;        /* mla_compute, of decode, decode_sparse, prefill, indexer_logits and indexer_top_k */
  int32_t indexer_format; /* mla_indexer_format, of append_indexer, indexer_logits and indexer_top_k */
  /* decode_sparse, prefill_sparse: query tokens times the entries of a token's lists; 0 = many */
  int64_t listed_keys;
  mla_dtype logits_dtype; /* indexer_logits, indexer_top_k, top_k: of the logits; zeros = f32 */
  /* 1: asks what a build with code for every GPU would do, and what this one lacks is "not in this build" */
  int32_t full_build;
  int64_t num_requests; /* decode: requests; 0 = many, and with batch_invariant */
} mla_problem;

/* Names the types in which numbers are multiplied and summed. */
typedef enum mla_arithmetic {
  MLA_ARITHMETIC_F64 = 0,
  MLA_ARITHMETIC_F32 = 1,
  MLA_ARITHMETIC_F16 = 2,
  MLA_ARITHMETIC_BF16 = 3,
  MLA_ARITHMETIC_E4M3 = 4
} mla_arithmetic;

/* Holds what one backend says of a problem. The numerics bound how far its results are from exact ones; backends that
 * only move or rotate channels say f32. */
typedef struct mla_verdict {
  size_t struct_size;       /* of the caller's version: no more is written */
  const char* backend;      /* its name; lives as long as the process */
  int32_t usable;           /* whether it can run the problem; mla_explain says why */
  int32_t multiplied;       /* mla_arithmetic, of queries and keys, softmax weights and values */
  int32_t summed;           /* mla_arithmetic, of products */
  int32_t products_per_cut; /* tensor cores add so many at once and cut the sum off; 0: every sum is rounded */
  int32_t query_bits;       /* significant bits of a query that take part, where it has more than `multiplied` */
  int32_t sum_bits;         /* significant bits that tensor cores keep of a sum */
  int32_t p_run;            /* keys of a run, whose softmax weights have one scale, with MLA_COMPUTE_FP8 */
  int32_t reserved;         /* 0 */
} mla_verdict;

/* The _init functions return the defaults of each struct: everything is zero or null, causal and interleaved are set,
 * and mla_problem has the shapes of DeepSeek-V3. */
#define MLA_DEFINE_INIT_(type)           \
  static inline type type##_init(void) { \
    type value;                          \
    memset(&value, 0, sizeof value);     \
    value.struct_size = sizeof value;    \
    return value;                        \
  }
#define MLA_DEFINE_INIT_WITH_(type, field) \
  static inline type type##_init(void) {   \
    type value;                            \
    memset(&value, 0, sizeof value);       \
    value.struct_size = sizeof value;      \
    value.field = 1;                       \
    return value;                          \
  }
MLA_DEFINE_INIT_(mla_context_options)
MLA_DEFINE_INIT_(mla_verdict)
MLA_DEFINE_INIT_WITH_(mla_decode_params, causal)
MLA_DEFINE_INIT_WITH_(mla_prefill_params, causal)
MLA_DEFINE_INIT_WITH_(mla_decode_sparse_params, interleaved)
MLA_DEFINE_INIT_(mla_prefill_sparse_params)
MLA_DEFINE_INIT_(mla_merge_states_params)
MLA_DEFINE_INIT_(mla_append_params)
MLA_DEFINE_INIT_(mla_gather_params)
MLA_DEFINE_INIT_(mla_copy_pages_params)
MLA_DEFINE_INIT_(mla_block_table_to_csr_params)
MLA_DEFINE_INIT_(mla_physical_slots_params)
MLA_DEFINE_INIT_(mla_append_indexer_params)
MLA_DEFINE_INIT_WITH_(mla_finish_output_params, interleaved)
MLA_DEFINE_INIT_WITH_(mla_indexer_logits_params, causal)
MLA_DEFINE_INIT_(mla_top_k_params)
MLA_DEFINE_INIT_WITH_(mla_indexer_top_k_params, causal)
#undef MLA_DEFINE_INIT_
#undef MLA_DEFINE_INIT_WITH_

static inline mla_append_rope_params mla_append_rope_params_init(void) {
  mla_append_rope_params value;
  memset(&value, 0, sizeof value);
  value.struct_size = sizeof value;
  value.interleaved = 1;
  value.norm_eps = 1e-6F;
  return value;
}

static inline mla_compress_params mla_compress_params_init(void) {
  mla_compress_params value;
  memset(&value, 0, sizeof value);
  value.struct_size = sizeof value;
  value.ratio = 1;
  value.interleaved = 1;
  value.norm_eps = 1e-6F;
  return value;
}

static inline mla_problem mla_problem_init(void) {
  mla_problem value;
  memset(&value, 0, sizeof value);
  value.struct_size = sizeof value;
  value.device.device_type = MLA_DEVICE_CPU;
  value.q_dtype.code = MLA_DTYPE_BFLOAT;
  value.q_dtype.bits = 16;
  value.q_dtype.lanes = 1;
  value.num_heads = 128;
  value.d_qk = 576;
  value.d_v = 512;
  value.q_len = 1;
  return value;
}

/* Returns the version, as "0.1.0". */
const char* mla_version(void);

/* Says what was wrong with the last call on this thread that failed; returns "" if none did. The text is valid until
 * the next failure. */
const char* mla_last_error(void);

/* Starts the workers. `options` may be null. The caller destroys the context, after its plans' last run. */
int mla_context_create(const mla_context_options* options, mla_context** out);
void mla_context_destroy(mla_context* context);
/* Returns the number of workers of a context; 0 for a null pointer. */
int32_t mla_context_num_threads(const mla_context* context);

/* These compute the bytes of workspace that plan and run need. Data pointers may still be null, except those of
 * lengths. */
int mla_decode_workspace_size(const mla_context* context, const mla_decode_params* params, size_t* out);
int mla_prefill_workspace_size(const mla_context* context, const mla_prefill_params* params, size_t* out);
int mla_decode_sparse_workspace_size(const mla_context* context, const mla_decode_sparse_params* params, size_t* out);
int mla_prefill_sparse_workspace_size(const mla_context* context, const mla_prefill_sparse_params* params, size_t* out);

/* Plans a batch into the workspace, which belongs to the plan from then on and must outlive it: planning again from
 * the same address, or overwriting its start, makes running the earlier plan an error. The caller destroys the plan. */
int mla_decode_plan(const mla_context* context, const mla_decode_params* params, void* workspace, size_t workspace_size,
                    mla_plan** out);
int mla_prefill_plan(const mla_context* context, const mla_prefill_params* params, void* workspace,
                     size_t workspace_size, mla_plan** out);
int mla_decode_sparse_plan(const mla_context* context, const mla_decode_sparse_params* params, void* workspace,
                           size_t workspace_size, mla_plan** out);
int mla_prefill_sparse_plan(const mla_context* context, const mla_prefill_sparse_params* params, void* workspace,
                            size_t workspace_size, mla_plan** out);
void mla_plan_destroy(mla_plan* plan);
/* These return the name of the backend that will run, and the plan in words; "" for a null pointer. The texts are valid
 * as long as the plan. */
const char* mla_plan_backend(const mla_plan* plan);
const char* mla_plan_describe(const mla_plan* plan);

/* Runs a planned batch: shapes and lengths must be those of the plan, and what run in mla/plan.h names beside them; all
 * else may have changed. */
int mla_decode_run(const mla_context* context, const mla_plan* plan, const mla_decode_params* params);
int mla_prefill_run(const mla_context* context, const mla_plan* plan, const mla_prefill_params* params);
int mla_decode_sparse_run(const mla_context* context, const mla_plan* plan, const mla_decode_sparse_params* params);
int mla_prefill_sparse_run(const mla_context* context, const mla_plan* plan, const mla_prefill_sparse_params* params);

int mla_merge_states_run(const mla_context* context, const mla_merge_states_params* params);
int mla_append_run(const mla_context* context, const mla_append_params* params);
int mla_gather_run(const mla_context* context, const mla_gather_params* params);
int mla_append_rope_run(const mla_context* context, const mla_append_rope_params* params);
int mla_copy_pages_run(const mla_context* context, const mla_copy_pages_params* params);
int mla_block_table_to_csr_run(const mla_context* context, const mla_block_table_to_csr_params* params);
int mla_physical_slots_run(const mla_context* context, const mla_physical_slots_params* params);
int mla_append_indexer_run(const mla_context* context, const mla_append_indexer_params* params);
int mla_indexer_logits_run(const mla_context* context, const mla_indexer_logits_params* params);
int mla_top_k_run(const mla_context* context, const mla_top_k_params* params);
int mla_indexer_top_k_run(const mla_context* context, const mla_indexer_top_k_params* params);
int mla_compress_run(const mla_context* context, const mla_compress_params* params);
int mla_finish_output_run(const mla_context* context, const mla_finish_output_params* params);

/* These give the number of backends of an operation, and the name of one by its index, best first. Names live as long
 * as the process. */
int mla_backend_count(int32_t op, size_t* out);
int mla_backend_name(int32_t op, size_t index, const char** out);

/* Writes one line per backend, "<name>: yes|no, <reason>", and a last line "selected: <name>" or "selected: none,
 * <reason>". `force` may be null. `*length` (may be null) receives the length of the whole text without its end; at
 * most capacity - 1 characters of it and a terminating zero are written to `text` (may be null if capacity is 0). */
int mla_explain(const mla_problem* problem, const char* force, char* text, size_t capacity, size_t* length);

/* Writes to `out` what the backend of that index, as in mla_backend_name, says of a problem. */
int mla_explain_backend(const mla_problem* problem, size_t index, mla_verdict* out);

#ifdef __cplusplus
}
#endif

#endif /* MLA_C_API_H_ */
