//! Tiles that a description names by their size: some kernel must have them, else the description would say something that no plan
//! follows. Which architecture it has does not matter: plans for a GPU without kernels of its own take Ampere's, and leave
//! configurations of others out.

use std::collections::BTreeSet;

use kernels_gpu::registry::{KernelId, KernelInfo, Op};

use super::{DecodeDescription, DeviceDescription};
use crate::plan::{
    data::{PlanError, Tile},
    model::PodConfig,
};

impl DeviceDescription {
    /// Checks that the tiles that it names are those of kernels. A CPU, and decodes of any size, have no kernels.
    pub(super) fn check_named_tiles(&self) -> Result<(), PlanError> {
        if self.is_cpu() {
            return Ok(());
        }
        for config in self.pod.configs.iter().filter(|config| !config.by_tickets) {
            config.check_tiles()?;
        }
        match self.decode.keys {
            Some(_) => Ok(()),
            None => self.decode.check_rows(),
        }
    }
}

impl DecodeDescription {
    fn check_rows(&self) -> Result<(), PlanError> {
        let priced = self.tiles.iter().map(|tile| ("decode.tiles: m", tile.m));
        let wider = self.tiles.iter().filter_map(|tile| tile.wider);
        let wider = wider.map(|wider| ("decode.tiles: wider.rows", wider.rows));
        let kept = self.rows.iter().map(|&rows| ("decode.rows", rows));
        for (field, rows) in priced.chain(wider).chain(kept) {
            if !rows_of(Op::Decode).any(|row| row.rows == rows) {
                let there: BTreeSet<u32> = rows_of(Op::Decode).map(|row| row.rows).collect();
                let there: Vec<_> = there.iter().map(u32::to_string).collect();
                return Err(PlanError::UnknownTile {
                    field: field.to_owned(),
                    got: format!("{rows} rows of decodes"),
                    there: there.join(", "),
                });
            }
        }
        Ok(())
    }
}

impl PodConfig {
    fn check_tiles(&self) -> Result<(), PlanError> {
        let field = || format!("pod.configs: {:?}", self.name);
        let Some(decode) = self.decode else {
            let alone = || rows_of(Op::Prefill).filter(|row| !row.co_resident);
            if alone().any(|row| tile_of(row) == self.prefill) {
                return Ok(());
            }
            let there: BTreeSet<Tile> = alone().map(tile_of).collect();
            let there: Vec<_> = there.iter().map(Tile::to_string).collect();
            return Err(PlanError::UnknownTile {
                field: field(),
                got: format!("prefills of {}", self.prefill),
                there: there.join(", "),
            });
        };
        let of = |op| rows_of(op).filter(|row| row.co_resident);
        let pairs = || {
            of(Op::Prefill).flat_map(move |prefill| {
                let decodes = of(Op::Decode).filter(|decode| self.takes(prefill, decode));
                decodes.map(move |decode| [prefill, decode].map(tile_of))
            })
        };
        if pairs().any(|pair| pair == [self.prefill, decode]) {
            return Ok(());
        }
        let there: BTreeSet<[Tile; 2]> = pairs().collect();
        let there = there
            .iter()
            .map(|[prefill, decode]| format!("{prefill} with {decode}"));
        Err(PlanError::UnknownTile {
            field: field(),
            got: format!("prefills of {} with decodes of {decode}", self.prefill),
            there: there.collect::<Vec<_>>().join(", "),
        })
    }

    /// Whether both were compiled for the same heads, and the decode for keys of the configuration's bits.
    fn takes(&self, prefill: &KernelInfo, decode: &KernelInfo) -> bool {
        let of = |row: &KernelInfo| (row.element, row.head_dim, row.value_dim);
        let bits = decode.cache.map_or(16, |_| 8);
        of(prefill) == of(decode) && self.kv_bits.is_none_or(|of_config| of_config == bits)
    }
}

fn rows_of(op: Op) -> impl Iterator<Item = &'static KernelInfo> {
    let rows = KernelId::all().map(KernelId::info);
    rows.filter(move |row| row.op == op)
}

fn tile_of(row: &KernelInfo) -> Tile {
    Tile {
        m: row.rows,
        n: row.keys,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{PlanOptions, Planner},
        problem::{Batch, PageTable, Spec},
    };

    /// The error of a description of an H200 with one change, by its parts.
    #[track_caller]
    fn refused(change: impl Fn(&mut DeviceDescription)) -> [String; 3] {
        let mut device = DeviceDescription::named("h200").unwrap();
        change(&mut device);
        let Err(PlanError::UnknownTile { field, got, there }) = device.check() else {
            panic!("{:?}", device.check())
        };
        [field, got, there]
    }

    #[test]
    fn tiles_that_no_kernel_has_are_refused() {
        for (change, [field, got, there]) in [
            (
                (|d| d.pod.configs[0].prefill.n = 81) as fn(&mut DeviceDescription),
                [
                    "pod.configs: \"two kernels, prefill 128 × 80\"",
                    "prefills of 128×81 with decodes of 8×64",
                    "128×80 with 8×64",
                ],
            ),
            (
                |d| d.pod.configs[1].decode = Some(Tile { m: 9, n: 64 }),
                ["prefill 128 × 64", "decodes of 9×64", "128×64 with 8×64"],
            ),
            // A prefill of heads of 64, and decodes of heads of 128.
            (
                |d| d.pod.configs[2].decode = Some(Tile { m: 8, n: 64 }),
                [
                    "heads of 64",
                    "128×112 with decodes of 8×64",
                    "128×112 with 8×128",
                ],
            ),
            // Those of 8 bits have other blocks.
            (
                |d| d.pod.configs[0].kv_bits = Some(8),
                ["prefill 128 × 80", "decodes of 8×64", "128×80 with 8×128"],
            ),
            (
                |d| d.pod.configs.last_mut().unwrap().prefill.m = 127,
                ["SMs apart", "prefills of 127×128", "128×128, "],
            ),
            (
                |d| d.decode.tiles[0].m = 7,
                ["decode.tiles: m", "7 rows", "8, 16, "],
            ),
            (
                |d| d.decode.tiles[0].wider.as_mut().unwrap().rows = 65,
                ["decode.tiles: wider.rows", "65 rows", "64, "],
            ),
            (
                |d| d.decode.rows = vec![8, 9],
                ["decode.rows", "9 rows", "8, 16, "],
            ),
        ] {
            let said = refused(change);
            for (said, part) in said.iter().zip([field, got, there]) {
                assert!(said.contains(part), "{part}: {said}");
            }
        }
    }

    /// A plan left the configuration out, in silence.
    #[test]
    fn no_batch_is_planned_for_them() {
        let mut device = DeviceDescription::named("h200").unwrap();
        device.pod.configs[0].prefill.n = 81;
        let mut table = PageTable::new(16, 1);
        table.push(&[0], 16);
        let (spec, batch) = (Spec::new(8, 2, 64), Batch::new(vec![0, 1], table));
        let planned = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let error = planned.unwrap_err().to_string();
        let there = "which no kernel has: there are ";
        assert!(
            error.contains(there) && error.contains("128×80 with 8×64"),
            "{error}"
        );
    }

    /// Tiles of any size are those of executors without kernels.
    #[test]
    fn tiles_of_any_size_are_not_looked_up() {
        let mut device = DeviceDescription::named("h200").unwrap();
        (device.decode.rows, device.decode.keys) = (vec![7], Some(64));
        assert_eq!(device.check(), Ok(()));
        let mut device = DeviceDescription::named("cpu").unwrap();
        device.decode.rows = vec![7];
        assert_eq!(device.check(), Ok(()));
    }
}
