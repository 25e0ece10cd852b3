//! Groups of ranks: shares of the same heads, whose results are merged.

use std::ops::Range;

use tandem_attn::{
    exec::gpu::{Gpu, NcclId, Rank, RankOptions},
    plan::Plan,
    shard::Share,
};

use crate::Failure;

/// Waiting must allow for the first load of kernels, which takes long.
pub(super) fn patience() -> RankOptions {
    RankOptions::default().with_timeout(std::time::Duration::from_secs(5))
}

/// The number of a share in its group, and how many the group has.
pub(super) const fn place(share: &Share) -> [u32; 2] {
    let Range { start, end } = share.group;
    [share.rank - start, end - start]
}

/// The groups of shares, in order. They exchange nothing with each other, and have equal sizes.
fn groups<'a>(shares: impl Iterator<Item = &'a Share>) -> Vec<Range<usize>> {
    let groups = shares.map(|share| share.group.start as usize..share.group.end as usize);
    let mut groups: Vec<_> = groups.collect();
    groups.dedup();
    groups
}

/// The rank of each share in its own group, and the group's id if it exchanges results and there is NCCL.
pub(super) fn ranks_of_groups(
    gpus: &[&Gpu],
    work: &[(Share, Plan)],
    tokens: usize,
) -> Result<Vec<(Rank, Option<NcclId>)>, Failure> {
    let groups = groups(work.iter().map(|(share, _)| share));
    let exchanging = groups.iter().filter(|group| group.len() > 1);
    let ids: Result<Vec<_>, _> = exchanging.map(|_| NcclId::new()).collect();
    // All groups have one, or none: their ranks measure the same exchanges.
    let ids = ids.unwrap_or_default();
    let mut all = Vec::new();
    for (index, group) in groups.into_iter().enumerate() {
        let spec = &work[group.start].0.spec;
        let ranks = Gpu::ranks(&gpus[group], spec, tokens, &patience())?;
        all.extend(
            ranks
                .into_iter()
                .map(|rank| (rank, ids.get(index).copied())),
        );
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use tandem_attn::problem::{Batch, PageTable, Spec};

    use super::*;
    use crate::deal::Deal;

    /// All ranks were once one group, which merged results of different heads.
    #[test]
    fn each_group_has_shares_of_the_same_heads() {
        let mut table = PageTable::new(16, 64);
        table.push(&[0, 1, 2, 3], 64);
        let (spec, batch) = (Spec::new(8, 4, 128), Batch::new(vec![0, 1], table));
        let of = |deal: &str| {
            let sharding = deal.parse::<Deal>().unwrap().over(4).unwrap();
            let shares = sharding.shares(&spec, &batch).unwrap();
            let groups = groups(shares.iter());
            for group in &groups {
                let of_group = &shares[group.clone()];
                let heads = &of_group[0].q_heads;
                assert!(
                    of_group.iter().all(|share| share.q_heads == *heads),
                    "{deal}"
                );
            }
            (groups, shares.iter().map(place).collect::<Vec<_>>())
        };
        let each = [0..1, 1..2, 2..3, 3..4];
        assert_eq!(of("heads"), (each.to_vec(), vec![[0, 1]; 4]));
        let (groups, places) = of("heads:2+pages:1");
        assert_eq!(groups, [0..2, 2..4]);
        assert_eq!(places, [[0, 2], [1, 2], [0, 2], [1, 2]]);
        let (groups, places) = of("pages:1");
        assert_eq!(groups, std::slice::from_ref(&(0..4)));
        assert_eq!(places, [[0, 4], [1, 4], [2, 4], [3, 4]]);
    }
}
