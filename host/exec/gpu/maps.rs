//! A cache of tensor maps, by shape and address.

use std::collections::HashMap;

use super::{
    driver::DevicePtr,
    tensor_map::{Swizzle, TensorMap},
};
use crate::{Error, problem::Dtype};

/// Everything in a tensor map except the address.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MapShape {
    pub(super) dtype: Dtype,
    pub(super) dims: [u64; 5],
    pub(super) strides: [u64; 4],
    pub(super) box_dims: [u32; 5],
}

/// A shape that [`Maps`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ShapeId(u32);

/// The tensor maps of a workspace's runs. Every step uses the same pools of a model's layers, and the same tensors
/// between layers.
#[derive(Debug, Default)]
pub(super) struct Maps {
    shapes: Vec<MapShape>,
    made: HashMap<(DevicePtr, ShapeId), [u64; 16]>,
}

/// Maximum number of tokens of a page in a box. Blocks of keys are multiples of this number or of a divisor.
pub(super) const BOX_TOKENS: u32 = 32;

/// Maximum numbers of shapes and maps that are kept. Their number grows, because the shapes of queries and outputs
/// depend on the tokens of a step.
const MOST: (usize, usize) = (256, 4096);

impl Maps {
    /// Forgets all maps if there are too many. Ids are then invalid.
    pub(super) fn tidy(&mut self) {
        if self.shapes.len() > MOST.0 || self.made.len() > MOST.1 {
            self.shapes.clear();
            self.made.clear();
        }
    }

    /// The map of a shape at an address, and the id of the shape, to get its map at another [address](Self::at).
    pub(super) fn make(
        &mut self,
        tensor: &'static str,
        address: DevicePtr,
        shape: MapShape,
    ) -> Result<(ShapeId, [u64; 16]), Error> {
        let known = self.shapes.iter().position(|known| *known == shape);
        let index = known.unwrap_or_else(|| {
            self.shapes.push(shape);
            self.shapes.len() - 1
        });
        let id = ShapeId(index as u32);
        Ok((id, self.at(tensor, address, id)?))
    }

    /// The map of a known shape at an address.
    pub(super) fn at(
        &mut self,
        tensor: &'static str,
        address: DevicePtr,
        id: ShapeId,
    ) -> Result<[u64; 16], Error> {
        if let Some(map) = self.made.get(&(address, id)) {
            return Ok(*map);
        }
        let MapShape {
            dtype,
            dims,
            strides,
            box_dims,
        } = &self.shapes[id.0 as usize];
        let swizzle = match u64::from(box_dims[0]) * u64::from(dtype.bytes()) {
            64 => Swizzle::Bytes64,
            _ => Swizzle::Bytes128,
        };
        let map = TensorMap {
            name: tensor,
            address,
            dtype: *dtype,
            dims,
            strides,
            box_dims,
            swizzle,
        };
        let map = map.encode()?;
        self.made.insert((address, id), map);
        Ok(map)
    }
}
