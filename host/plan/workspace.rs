//! Sizes of plans within limits, and the layout of a workspace.
//!
//! A captured graph keeps the addresses with which it was captured. Therefore the offsets of arrays depend on a
//! [`Bound`] only, not on the plan. The arrays that are copied to the device for every plan come first, then the arrays that
//! kernels write. The bound is known before anything is allocated, and plans made with it stay within it.

use std::ops::Range;

use bytemuck::Pod;
use kernels_gpu::{
    abi::{ConvertedPage, LaunchRecord, MergeRow, PieceOf, QueryRow, WorkItem},
    registry::Arch,
    sm80::pod::COUNTERS,
};
use serde::{Deserialize, Serialize};

use super::{
    data::{BatchLimits, Bound, Kernel, Plan, PlanError, PlanOptions, SplitMode},
    model::{DeviceDescription, TileTable},
    split::MAX_PIECES,
};
use crate::problem::{Masks, Padding, PageTable, Spec};

impl Bound {
    /// The bound of all plans within the limits that are made with these options and this bound.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`], [`PlanError::NoTile`], [`PlanError::TooLarge`], [`PlanError::Device`], [`PlanError::Problem`] for
    /// the specification or the page size of the limits, [`PlanError::TooManyPieces`] if decodes within the limits have more work
    /// items than a plan can have.
    pub fn new(
        spec: &Spec,
        device: &DeviceDescription,
        options: &PlanOptions,
        limits: &BatchLimits,
    ) -> Result<Self, PlanError> {
        spec.check()?;
        device.check()?;
        device.supports_with(spec, options.decode_tile)?;
        PageTable::try_new(limits.page_size, 0)?;
        if limits.trees || limits.mask_words > 0 {
            device.supports_masks(spec)?;
        }
        let tiles = TileTable::of_options(device, spec, options)?;
        let wide = |number: u32| u64::from(number);
        let parts = wide(limits.parts.max(1));
        let tokens = wide(limits.query_tokens);
        // Every row block has a last tile that may not be full.
        let narrowest = tiles.fewest_tokens();
        let last = wide(limits.requests).min(tokens);
        let whole = parts * (last + tokens / wide(narrowest));
        let of_decodes = tokens.min(last.saturating_mul(device.decode_max_tokens.into()));
        // Beside prefills, tiles of decodes hold fewer query tokens, too. Of a plan that would exceed the bound, no tile is cut.
        let co_resident = device.pod.configs.iter().filter_map(|config| {
            let tiles = TileTable::fused(device, spec, options.decode_tile, config)?;
            let in_tiles = |tokens: u64, of_tile: u32| tokens / wide(of_tile.max(1));
            let decodes = in_tiles(of_decodes, tiles.decode_tokens());
            Some(decodes + in_tiles(tokens, tiles.fewest_tokens_of_prefills()))
        });
        let co_resident_tiles = co_resident.max().unwrap_or(0);
        // Splits fill the resident CTAs. A column is one CTA for each unit of an item.
        let units = spec.kv_heads;
        let columns = wide(device.resident_ctas(Kernel::Decode) / units + 1);
        // Two CTAs of 64 rows share an SM, and each may leave a state of every token.
        let most = tiles.most_tokens_of_decodes(device, spec);
        let in_rows = most.min(tiles.decode_tokens());
        let of_column = SLOTS_PER_COLUMN.max(2 * wide(in_rows.min(limits.query_tokens)));
        let (items, states) = match options.split {
            SplitMode::Fixed { tokens: chunk } => {
                let chunks = wide(limits.kv_len.div_ceil(chunk.max(1)).max(1));
                (2 * whole * chunks, tokens * parts * chunks)
            }
            _ => (
                (4 * (whole + columns)).max(parts * (last + co_resident_tiles)),
                tokens * parts * wide(limits.states_per_token.max(2)) + of_column * columns,
            ),
        };
        // Decodes without common pages: each piece has pages of its own.
        let (chunks, pages) = match options.split {
            SplitMode::Fixed { tokens } => (
                limits.kv_len.div_ceil(tokens.max(1)).max(1),
                tokens.div_ceil(limits.page_size),
            ),
            _ => (1, 1),
        };
        let pieces = (last * wide(chunks)).min(wide(limits.page_ids / pages.max(1)));
        if pieces > MAX_PIECES as u64 {
            return Err(PlanError::TooManyPieces {
                got: pieces,
                limit: MAX_PIECES as u64,
            });
        }
        let fit = PlanError::narrow;
        Ok(Self {
            items: fit("work items", items)?,
            rows: fit("rows of gathered items", states + tokens)?,
            page_ids: limits.page_ids,
            merges: limits.query_tokens,
            slots: fit("partial states", states)?,
            ancestors: match limits.trees {
                true => limits.query_tokens,
                false => 0,
            },
            mask_words: match limits.mask_words {
                0 => 0,
                // Two describe a token. A graph with room for masks reads ancestors as masks.
                words => {
                    let of_tokens = (2 + u64::from(limits.trees)) * tokens;
                    fit("words of masks", wide(words) + of_tokens)?
                }
            },
            padded_tokens: match spec.moves_queries() {
                true => limits.query_tokens,
                false => 0,
            },
            // No prefill of Hopper converts padded heads.
            converted_pages: match spec.converts()
                && (Padding::of(spec).is_none() || !Arch::Sm90a.runs_on(device.compute_capability))
                && !device.is_cpu()
            {
                // Every request has a last page in each part that may not be full.
                true => {
                    let keys = wide(limits.prefill_keys);
                    let last = (parts * wide(limits.requests)).min(keys);
                    let pages = keys.div_ceil(ConvertedPage::KEYS.into()) + last;
                    fit("pages of 64 keys that prefills convert", pages)?
                }
                false => 0,
            },
        })
    }
}

/// Splits of decodes of few tokens may add this many partial states for each column of CTAs that takes an item.
const SLOTS_PER_COLUMN: u64 = 32;

/// Arrays start at multiples of this: a line of the L2 cache, and enough for any vector access.
const ALIGNMENT: u64 = 256;

/// The place of each array in a workspace, in bytes from its start.
///
/// The first [`upload_bytes`](Self::upload_bytes) are a plan as [`write`](Self::write) stores it; the rest is
/// scratch memory. `arrivals`, `tickets`, `counters`, `converted_done` and `conversion_control` must be zero when the workspace is first used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceLayout {
    /// `[MAX_LAUNCHES + 1]` [`LaunchRecord`]: what each captured launch has to do, merging last.
    pub records: Range<u64>,
    /// `[items]` [`WorkItem`].
    pub items: Range<u64>,
    /// `[rows]` [`QueryRow`].
    pub rows: Range<u64>,
    /// `[merges]` [`MergeRow`].
    pub merges: Range<u64>,
    /// `[merges]` [`MergeRow`]: those that are left to the merging kernel.
    pub left_merges: Range<u64>,
    /// `[slots]` u32.
    pub merge_slots: Range<u64>,
    /// `[page_ids]` u32.
    pub page_ids: Range<u64>,
    /// `[query tokens]` u64: [`Plan::ancestors`].
    pub ancestors: Range<u64>,
    /// `[mask_words]` u64: [`Plan::masks`], a [`TokenMask`](kernels_gpu::abi::TokenMask) for each query token and the words after these.
    pub masks: Range<u64>,
    /// `[converted_pages]` [`ConvertedPage`]: what prefills convert.
    pub conversions: Range<u64>,
    /// `[converted_pages]` u32: the tables of these pages.
    pub converted_ids: Range<u64>,
    /// `[slots, q_heads, head_dim_v]` f32.
    pub partial_out: Range<u64>,
    /// `[slots, q_heads]` f32.
    pub partial_lse: Range<u64>,
    /// `[merges, kv_heads]` u32; of latent heads `[merges, tiles of 64 heads, 8]`.
    pub arrivals: Range<u64>,
    /// `[launches]` u32; room for `MAX_LAUNCHES`.
    pub tickets: Range<u64>,
    /// `[`[`COUNTERS`]`]` u32, of kernels that have prefill and decode in one.
    pub counters: Range<u64>,
    /// Padded queries of 16 bits and padded outputs of 16 bits or F32: `[padded_tokens, q_heads, kernel's head dimension]`. F32
    /// queries whose heads are not padded are rounded to the first of these.
    pub padded: [Range<u64>; 2],
    /// `[padded_tokens, q_heads, head_dim_qk]` of 16 bits: F32 queries, rounded before their heads are padded.
    pub rounded: Range<u64>,
    /// Keys and values that prefills converted, of 16 bits each, or of 8 bits if [prefills compute in 8
    /// bits](crate::problem::Compute): `[converted_pages, kv_heads, 64, head dimension]`.
    pub converted: [Range<u64>; 2],
    /// `[converted_pages, kv_heads, 2]` u32: which keys and which values are already converted.
    pub converted_done: Range<u64>,
    /// Three u32 by which CTAs share that work.
    pub conversion_control: Range<u64>,
    /// `[pairs]` u64, and zeros up to a multiple of 8: the angle by which each pair of a head rotates (RoPE) from one position to the next.
    pub turns: Range<u64>,
    /// Bytes that are copied to the device for every plan.
    pub upload_bytes: u64,
    /// Bytes of the whole workspace.
    pub bytes: u64,
}

/// The most launches of a plan.
pub const MAX_LAUNCHES: u32 = 64;

impl Bound {
    /// Bytes of device memory of a workspace for plans within this bound. A workspace also has pinned memory of the host, for four
    /// plans on their way to the device.
    ///
    /// ```
    /// use tandem_attn::plan::{BatchLimits, Bound, DeviceDescription, PlanOptions};
    /// use tandem_attn::problem::Spec;
    ///
    /// let (spec, device) = (Spec::new(32, 8, 128), DeviceDescription::named("h200")?);
    /// let bytes = |limits: BatchLimits| -> Result<u64, tandem_attn::plan::PlanError> {
    ///     Ok(Bound::new(&spec, &device, &PlanOptions::default(), &limits)?.workspace_bytes(&spec))
    /// };
    /// let decodes = BatchLimits::decodes(256, 8192, 16);
    /// assert!(bytes(decodes)? < bytes(decodes.with_query_tokens(4096))?);
    /// # Ok::<(), tandem_attn::plan::PlanError>(())
    /// ```
    #[must_use]
    pub fn workspace_bytes(&self, spec: &Spec) -> u64 {
        WorkspaceLayout::new(spec, self).bytes
    }
}

impl WorkspaceLayout {
    /// The layout for plans within a bound.
    #[must_use]
    pub fn new(spec: &Spec, bound: &Bound) -> Self {
        let mut end = 0u64;
        let mut section = |count: u64, bytes: usize| {
            let start = end.next_multiple_of(ALIGNMENT);
            end = start + count * bytes as u64;
            start..end
        };
        let Bound {
            items,
            rows,
            page_ids,
            merges,
            slots,
            ancestors,
            mask_words,
            padded_tokens,
            converted_pages,
        } = *bound;
        let pads = Padding::of(spec).is_some();
        let rounds = pads && spec.rounds_queries();
        let (own_dim, out_bytes) = (u64::from(spec.head_dim_qk), spec.bytes_of_padded_outputs());
        let converted = [spec.head_dim_qk, spec.head_dim_v];
        let spec = &spec.on_kernels();
        let (q_heads, kv_heads) = (u64::from(spec.q_heads), u64::from(spec.kv_heads));
        let records = section((MAX_LAUNCHES + 1).into(), size_of::<LaunchRecord>());
        let items = section(items.into(), size_of::<WorkItem>());
        let rows = section(rows.into(), size_of::<QueryRow>());
        let merge_rows = section(merges.into(), size_of::<MergeRow>());
        let left_merges = section(merges.into(), size_of::<MergeRow>());
        let merge_slots = section(slots.into(), size_of::<u32>());
        let page_ids = section(page_ids.into(), size_of::<u32>());
        let ancestors = section(ancestors.into(), size_of::<u64>());
        let masks = section(mask_words.into(), size_of::<u64>());
        let conversions = section(converted_pages.into(), size_of::<ConvertedPage>());
        let converted_ids = section(converted_pages.into(), size_of::<u32>());
        let upload_bytes = converted_ids.end;
        let states = u64::from(slots) * q_heads;
        let partial_out = section(states * u64::from(spec.head_dim_v), size_of::<f32>());
        let partial_lse = section(states, size_of::<f32>());
        let of_merge = match spec.latent {
            true => u64::from(spec.q_heads.div_ceil(64) * PieceOf::COUNTERS),
            false => kv_heads,
        };
        let arrivals = section(u64::from(merges) * of_merge, size_of::<u32>());
        let tickets = section(MAX_LAUNCHES.into(), size_of::<u32>());
        let counters = section(COUNTERS.into(), size_of::<u32>());
        let padded_rows = u64::from(padded_tokens) * q_heads;
        let padded_outputs = if pads { padded_rows } else { 0 };
        let padded = [
            section(padded_rows * u64::from(spec.head_dim_qk), 2),
            section(padded_outputs * u64::from(spec.head_dim_v), out_bytes),
        ];
        let rounded = section(if rounds { padded_rows * own_dim } else { 0 }, 2);
        let converted_rows = u64::from(converted_pages) * kv_heads * u64::from(ConvertedPage::KEYS);
        let converted =
            converted.map(|dim| section(converted_rows * u64::from(dim), spec.converted_bytes()));
        let converted_done = section(u64::from(converted_pages) * kv_heads * 2, size_of::<u32>());
        let conversion_control = section(3, size_of::<u32>());
        let pairs = spec.rotary.map_or(0, |rope| rope.dim / 2);
        let turns = section(u64::from(pairs).next_multiple_of(8), size_of::<u64>());
        Self {
            records,
            items,
            rows,
            merges: merge_rows,
            left_merges,
            merge_slots,
            page_ids,
            ancestors,
            masks,
            partial_out,
            partial_lse,
            arrivals,
            upload_bytes,
            bytes: turns.end,
            tickets,
            counters,
            padded,
            rounded,
            conversions,
            converted_ids,
            converted,
            converted_done,
            conversion_control,
            turns,
        }
    }

    /// Writes a plan's arrays to their places in the first [`upload_bytes`](Self::upload_bytes) of a
    /// workspace. Bytes between them do not change.
    ///
    /// # Errors
    /// [`PlanError::Bound`] if an array is longer than its place.
    ///
    /// # Panics
    /// If `upload` is shorter than [`upload_bytes`](Self::upload_bytes).
    pub fn write(&self, plan: &Plan, upload: &mut [u8]) -> Result<(), PlanError> {
        fn put<T: Pod>(
            what: &'static str,
            array: &[T],
            to: &Range<u64>,
            upload: &mut [u8],
        ) -> Result<(), PlanError> {
            let bytes: &[u8] = bytemuck::cast_slice(array);
            let place = &mut upload[to.start as usize..to.end as usize];
            let Some(place) = place.get_mut(..bytes.len()) else {
                let entries = |bytes: usize| (bytes / size_of::<T>()) as u64;
                return Err(PlanError::Bound {
                    what,
                    needed: entries(bytes.len()),
                    bound: entries(place.len()),
                });
            };
            place.copy_from_slice(bytes);
            Ok(())
        }
        put("work items", &plan.items, &self.items, upload)?;
        put("rows of gathered items", &plan.rows, &self.rows, upload)?;
        put("merges", &plan.merges, &self.merges, upload)?;
        put(
            "partial states",
            &plan.merge_slots,
            &self.merge_slots,
            upload,
        )?;
        put("page ids", &plan.page_ids, &self.page_ids, upload)?;
        put("ancestors", &plan.ancestors, &self.ancestors, upload)?;
        if plan.masks.is_empty() {
            return Ok(());
        }
        self.write_masks(&plan.masks, upload)
    }

    /// Writes masks to their place in an upload.
    ///
    /// # Errors
    /// [`PlanError::Bound`] if they are longer than their place.
    pub(crate) fn write_masks(&self, masks: &Masks, upload: &mut [u8]) -> Result<(), PlanError> {
        let place = &mut upload[self.masks.start as usize..self.masks.end as usize];
        let (needed, bound) = (masks.array_len(), place.len() / size_of::<u64>());
        match place.get_mut(..needed * size_of::<u64>()) {
            Some(place) => {
                masks.write(place);
                Ok(())
            }
            None => Err(PlanError::Bound {
                what: "words of masks",
                needed: needed as u64,
                bound: bound as u64,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
