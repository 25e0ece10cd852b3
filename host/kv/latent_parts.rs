//! Latent keys in two pools: what is both key and value, and what only the keys have.

use super::{KvScales, KvStrides, KvView, RopePart, rows::row};
use crate::{
    problem::{KvLayout, Spec},
    tensor::{Element, ShapeError},
};

impl<'a, T: Element> KvView<'a, T> {
    /// The two pools of [latent](Spec::latent) attention: the latent part of the keys, which is also the values,
    /// `[pages, page_size, head_dim_v]`, and the rest, `[pages, page_size, head_dim_qk - head_dim_v]`.
    ///
    /// Results are those of [one pool](Self::latent) with the same elements. Pools with other strides: set the fields,
    /// also that of `rope`. New keys are appended by [`Cpu::append_rows`](crate::Cpu::append_rows), once for each pool.
    ///
    /// ```
    /// # use tandem_attn::{Cpu, kv::KvView, plan::{PlanOptions, Planner}, problem::{Batch, PageTable, Spec}};
    /// let spec = Spec::latent(1, 16, 16).with_dtype(tandem_attn::problem::Dtype::F32);
    /// let (mut table, mut planner, cpu) = (PageTable::new(2, 1), Planner::new(), Cpu::new());
    /// table.push(&[0], 2);
    /// let batch = Batch::new(vec![0, 1], table);
    /// let plan = planner.plan(&spec, &batch, &cpu.device(), &PlanOptions::default())?;
    ///
    /// // A page of two tokens.
    /// let latent: Vec<f32> = (0..2 * 16).map(|i| i as f32 / 16.0).collect();
    /// let rope: Vec<f32> = (0..2 * 16).map(|i| 1.0 - i as f32 / 16.0).collect();
    /// let (q, mut out, mut same) = ([0.5_f32; 32], [0.0_f32; 16], [0.0_f32; 16]);
    /// cpu.run(&plan, &q, &[KvView::latent_parts(&spec, 2, &latent, &rope)], &mut out, None)?;
    ///
    /// let pool = [&latent[..16], &rope[..16], &latent[16..], &rope[16..]].concat();
    /// cpu.run(&plan, &q, &[KvView::latent(&spec, 2, &pool)], &mut same, None)?;
    /// assert_eq!(out, same);
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    #[must_use]
    pub const fn latent_parts(spec: &Spec, page_size: u32, latent: &'a [T], rope: &'a [T]) -> Self {
        let [strides, of_rope] = dense_parts(spec, page_size);
        Self {
            rope: Some(RopePart {
                pool: rope,
                strides: of_rope,
            }),
            ..Self::of([latent; 2], [strides; 2])
        }
    }

    /// Checks that the specification's keys can be in two pools, if they are.
    pub(super) fn check_rope(&self, spec: &Spec, part: usize) -> Result<(), ShapeError> {
        match self.rope {
            Some(_) => check_parts(spec, self.scales == KvScales::InRow, part),
            None => Ok(()),
        }
    }

    /// The elements of a key that are in pool `k`, and those in a pool of their own.
    pub(crate) fn key_parts(&self, spec: &Spec) -> [u32; 2] {
        match self.rope {
            None => [spec.head_dim_qk, 0],
            Some(_) => [spec.head_dim_v, rope_dim(spec)],
        }
    }

    /// The elements of a token in the pool of [`RopePart`], if there is one.
    pub(super) fn rope_row(&self, page: u32, offset: u32, elements: u32) -> &'a [T] {
        self.rope.map_or(&[], |rope| {
            &rope.pool[row(rope.strides, page, offset, 0, elements)]
        })
    }
}

/// Checks that a specification's keys can be in two pools.
pub(crate) fn check_parts(spec: &Spec, in_row: bool, part: usize) -> Result<(), ShapeError> {
    match spec.latent && !in_row {
        true => Ok(()),
        false => Err(ShapeError::NotInParts {
            part,
            latent: spec.latent,
        }),
    }
}

/// Strides of dense pools of both parts.
pub(crate) const fn dense_parts(spec: &Spec, page_size: u32) -> [KvStrides; 2] {
    [
        KvLayout::Nhd.strides(page_size, 1, spec.head_dim_v),
        KvLayout::Nhd.strides(page_size, 1, rope_dim(spec)),
    ]
}

/// Elements of a key that are no part of the value.
pub(crate) const fn rope_dim(spec: &Spec) -> u32 {
    spec.head_dim_qk.saturating_sub(spec.head_dim_v)
}
