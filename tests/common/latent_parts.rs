//! The same latent keys in one pool and in two.

use tandem_attn::{
    kv::{KvStrides, KvView, RopePart},
    problem::Spec,
    tensor::Element,
};

use super::problems::Pools;

/// The two pools of latent keys, with so many elements between rows, and between pages.
#[derive(Clone, Debug)]
pub struct Parts<T> {
    pub latent: Vec<T>,
    pub rope: Vec<T>,
    pub strides: [KvStrides; 2],
}

impl<T: Element> Parts<T> {
    pub fn of(spec: &Spec, pool: &Pools<T>, gaps: [[u32; 2]; 2]) -> Self {
        let one = pool.k_strides;
        let pages = pool.k.len() / one.page as usize;
        let split = spec.head_dim_v as usize;
        let columns = [0..split, split..spec.head_dim_qk as usize];
        let strides = [0, 1].map(|part| {
            let [of_row, of_page] = gaps[part];
            let token = columns[part].len() as u32 + of_row;
            KvStrides {
                page: one.page_size * token + of_page,
                token,
                head: token,
                page_size: one.page_size,
            }
        });
        let [latent, rope] = [0, 1].map(|part| {
            let strides = strides[part];
            let mut to = vec![T::from_f32(f32::NAN); pages * strides.page as usize];
            for slot in 0..pages * one.page_size as usize {
                let (page, token) = (slot / one.page_size as usize, slot % one.page_size as usize);
                let at = |s: KvStrides| page * s.page as usize + token * s.token as usize;
                let from = &pool.k[at(one)..][columns[part].clone()];
                to[at(strides)..][..from.len()].copy_from_slice(from);
            }
            to
        });
        Self {
            latent,
            rope,
            strides,
        }
    }

    pub fn view(&self, spec: &Spec) -> KvView<'_, T> {
        let [latent, rope] = self.strides;
        let dense = KvView::latent_parts(spec, latent.page_size, &self.latent, &self.rope);
        KvView {
            k_strides: latent,
            v_strides: latent,
            rope: Some(RopePart {
                pool: &self.rope,
                strides: rope,
            }),
            ..dense
        }
    }
}
