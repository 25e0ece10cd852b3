//! Forecasts of tiles in rounds, and the choice of the shortest.

use super::*;
use crate::plan::{data::PodMode, model::DeviceDescription};

fn h200() -> (PodDescription, u32) {
    let device = DeviceDescription::named("h200").unwrap();
    (device.pod, device.sms)
}

/// Tiles that take this long on the whole device.
fn load(ns: f64, tiles: u32) -> PrefillLoad {
    let mut load = PrefillLoad::new(true);
    load.add(0, tiles, ns * 132.0 / f64::from(tiles.max(1)));
    load
}

fn whole(load: &PrefillLoad, ctas: u32) -> f64 {
    load.whole(ctas).iter().sum()
}

#[test]
fn tiles_take_rounds() {
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b.max(1.0), "{a}, not {b}");
    near(whole(&load(100e3, 264), 132), 100e3);
    near(whole(&load(100e3, 256), 132), 100e3 * 264.0 / 256.0);
    near(whole(&load(100e3, 264), 88), 150e3);
    // One tile on each of half of the SMs takes as long as one on each of all SMs.
    near(whole(&load(50e3, 66), 132), whole(&load(100e3, 132), 132));
    near(whole(&load(0.0, 0), 132), 0.0);
    // A long tile among short ones, and several launches one after the other.
    let mut mixed = load(10e3, 264);
    mixed.add(0, 1, 90e3);
    near(whole(&mixed, 132), 90e3);
    mixed.add(1, 1, 20e3);
    near(whole(&mixed, 132), 110e3);
    // If it is cut, the long tile no longer limits the time.
    let cut = mixed.alone(132);
    assert!(cut < 55e3, "{cut}");
    // After 80 long tiles, 30 CTAs are left for 64 tiles of half the length: the last ones follow a long tile.
    let mut unlike = PrefillLoad::new(true);
    unlike.add(0, 80, 200e3);
    unlike.add(0, 64, 110e3);
    near(whole(&unlike, 110), 310e3);
}

/// More different times than a forecast keeps apart.
#[test]
fn tiles_of_many_lengths_end_between_the_even_share_and_one_tile_more() {
    let mut load = PrefillLoad::new(true);
    let mut work = 0.0;
    for i in 0..60 {
        let ns = 1e3 * 1.1_f64.powi(i);
        load.add(0, 3 + i.unsigned_abs() % 5, ns);
        work += f64::from(3 + i % 5) * ns;
    }
    let longest = 1e3 * 1.1_f64.powi(59);
    for ctas in [1, 7, 33, 132, 500] {
        let (even, time) = (work / f64::from(ctas), whole(&load, ctas));
        assert!(time >= even.max(longest) * 0.95, "{time} on {ctas}");
        assert!(time <= 1.05 * (even + longest), "{time} on {ctas}");
        assert!(load.beside(0.0, ctas, 1.0).0[0] <= time);
    }
}

/// Beside decodes at most two pieces for each CTA are made.
#[test]
fn tiles_are_cut_into_two_pieces_for_each_cta_beside_decodes() {
    let (few, many) = (load(50e3, 66), load(100e3, 256));
    assert!(few.beside(0.0, 132, 1.0).0[0] < 70e3);
    let uncut = whole(&many, 121);
    assert!(many.alone(121) < 0.9 * uncut && many.beside(0.0, 121, 1.0).0[0] == uncut);
    // The last eight of 140 tiles fill what 132 others leave.
    let nearly = load(100e3, 140);
    assert!(nearly.beside(0.0, 132, 1.0).0[0] < 0.7 * whole(&nearly, 132));
    // Among many short tiles, the few long ones are cut.
    let mut long = PrefillLoad::new(true);
    long.add(0, 40, 300e3);
    long.add(0, 60, 3e3);
    assert!(long.tiles() > 88);
    let [cut, merged] = long.beside(0.0, 88, 1.0).0;
    assert!(cut < 0.6 * whole(&long, 88), "{cut}");
    // Their states take memory bandwidth.
    assert!(merged > 0.0);
    // They are whole if the decodes take longer anyway.
    assert_eq!(long.beside(400e3, 88, 1.0).0, [whole(&long, 88), 0.0]);
}

/// Pieces of cut tiles end when the last of them does, not when the last might.
#[test]
fn the_end_of_pieces_is_counted() {
    // At most 264 pieces: 32 long tiles are cut into two, and 128 short ones fill the gaps.
    let mut load = PrefillLoad::new(true);
    load.add(0, 32, 93e3);
    load.add(0, 128, 17e3);
    let (times, pieces) = load.beside(0.0, 132, 1.0);
    assert!(times[0] < 60e3 && pieces <= 264, "{times:?} of {pieces}");
    assert!(pieces > load.tiles());
}

/// All CTAs that have a piece of a tile convert.
#[test]
fn ctas_with_pieces_of_tiles_convert() {
    let (pod, sms) = h200();
    let streams = |divisible, before_ns| {
        let conversion = Conversion {
            before_ns,
            first_ns: 8e3,
            pieces: 1000.0,
            piece_ns: 5e3,
        };
        let few = PrefillLoad {
            divisible,
            ..load(30e3, 16)
        };
        let (forecast, _) =
            pod.forecast(sms, &few.converting(conversion), std::iter::empty(), 10e3);
        forecast
    };
    let (cut, whole) = (streams(true, 0.0), streams(false, 0.0));
    assert!(cut.streams_ns < 150e3, "{cut:?}");
    assert!(whole.streams_ns > 250e3, "{whole:?}");
    // A launch before prefills that run alone converts for them.
    let (before, beside) = (streams(true, 20e3), streams(true, 0.0));
    let more = before.serial_ns - beside.serial_ns;
    assert!((more - 12e3).abs() < 1.0, "{more}");
    assert_eq!(before.streams_ns, beside.streams_ns);
}

/// On two streams, decodes begin on the SMs that have no tile.
#[test]
fn decodes_on_a_second_stream_wait_for_busy_sms() {
    let (pod, sms) = h200();
    let streams = |prefill: PrefillLoad, decode_ns| {
        let none = std::iter::empty();
        let (forecast, _) = pod.forecast(sms, &prefill, none, decode_ns);
        forecast.streams_ns / forecast.serial_ns
    };
    let uncut = |ns, tiles| PrefillLoad {
        divisible: false,
        ..load(ns, tiles)
    };
    let (full, half) = (uncut(100e3, sms), uncut(50e3, sms / 2));
    assert_eq!(whole(&full, sms), whole(&half, sms));
    assert!(streams(full, 60e3) > 0.95);
    assert!(streams(half, 40e3) < 0.8);
}

#[test]
fn the_shortest_forecast_wins() {
    let (pod, sms) = h200();
    let forecast = |prefill: PrefillLoad, decode| {
        let fused = std::iter::once(Some((prefill, decode)));
        pod.forecast(sms, &prefill, fused, decode * pod.decode_alone)
    };
    let (even, _) = forecast(load(400e3, 1024), 400e3);
    assert_eq!(even.best(), PodMode::Fused);
    assert!(
        even.fused_ns < 0.75 * even.serial_ns
            && even.fused_ns > even.prefill_ns.max(even.decode_ns)
    );
    // The prefill takes longer: it gets every SM that saves it a round.
    let (_, choice) = forecast(load(700e3, 512), 400e3);
    let ctas = choice.unwrap().ctas;
    assert!(ctas.prefill >= 128, "{ctas:?}");
    let (_, choice) = forecast(load(700e3, 8192), 400e3);
    assert_eq!(choice.unwrap().ctas, CtaSplit::new(sms, sms));
    // The decodes take longer: they get some SMs for themselves.
    let (_, choice) = forecast(load(120e3, 256), 400e3);
    let ctas = choice.unwrap().ctas;
    assert!(ctas.prefill < sms && ctas.decode > sms, "{ctas:?}");
    // There is nearly nothing to hide.
    let (lopsided, _) = forecast(load(1000e3, 1024), 5e3);
    assert_ne!(lopsided.best(), PodMode::Fused);
    // Prefills on a few of the SMs overlap with decodes.
    let (apart, _) = forecast(load(10e3, 16), 400e3);
    assert_ne!(apart.best(), PodMode::Serial);

    // Tiles for half of the SMs are cut, if cuts are allowed.
    let half = load(100e3, 64);
    let whole = PrefillLoad {
        divisible: false,
        ..half
    };
    let serial = |prefill| forecast(prefill, 50e3).0.serial_ns;
    assert!(serial(half) < serial(whole) - 80e3);

    let none = PodDescription::default();
    let (forecast, choice) = none.forecast(sms, &load(1.0, 1), std::iter::empty(), 1.0);
    assert_eq!((forecast.best(), choice), (PodMode::Serial, None));
}

#[test]
fn devices_of_any_size_have_a_forecast() {
    let (pod, _) = h200();
    for sms in (1..10).chain([132, 10_000]) {
        for tiles in [0, 1, 7, 64, 1 << 20] {
            let load = load(1e3, tiles);
            let fused = std::iter::once(Some((load, 1e3)));
            let (forecast, choice) = pod.forecast(sms, &load, fused, 1e3);
            assert!(forecast.fused_ns.is_finite());
            let ctas = choice.unwrap().ctas;
            assert!((1..=sms).contains(&ctas.prefill), "{ctas:?} of {sms}");
        }
    }
}

#[test]
fn shares_lie_between_those_measured() {
    let (pod, sms) = h200();
    let config = &pod.configs[0];
    assert!(config.shares.is_sorted_by(|a, b| a.part < b.part));
    assert_eq!(config.share(1, sms).prefill, config.shares[0].prefill);
    assert_eq!(config.share(sms, sms), *config.shares.last().unwrap());
    for two in config.shares.windows(2) {
        let ctas = (f64::from(sms) * (two[0].part + two[1].part) / 2.0) as u32;
        let prefill = config.share(ctas, sms).prefill;
        let [low, high] = [two[0].prefill, two[1].prefill];
        assert!((low.min(high)..=low.max(high)).contains(&prefill), "{ctas}");
    }
}
